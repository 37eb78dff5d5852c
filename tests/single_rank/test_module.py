"""The module that comes back is the user's own: same object, names and class; a copy of it is plain."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh

from ddp_compile import ddp_compile, torch_internals


class Net(nn.Module):
    """Documented by its author."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))) * scale

    def number_of_layers(self) -> int:
        return 2


def replicated(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return ddp_compile(Net(), **{"backend": "eager", **settings})


def test_it_is_the_same_object_of_the_users_class(single_rank_group: None) -> None:
    net = Net()
    first = net.first
    model = ddp_compile(net, backend="eager")
    assert model is net and model.first is first
    assert isinstance(model, Net) and model.number_of_layers() == 2
    cls = type(model)
    assert (cls.__name__, cls.__qualname__, cls.__module__, cls.__doc__) == (
        "Net",
        Net.__qualname__,
        Net.__module__,
        Net.__doc__,
    )
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)


def test_state_dict_has_the_modules_own_keys(single_rank_group: None) -> None:
    assert list(replicated().state_dict()) == list(Net().state_dict())


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_checkpoints_of_wrapped_models_load(prefix: str, single_rank_group: None) -> None:
    saved = Net().state_dict()
    model = replicated()
    result = model.load_state_dict({f"{prefix}{key}": value for key, value in saved.items()})
    assert not result.missing_keys and not result.unexpected_keys
    assert all(torch.equal(model.state_dict()[key], value) for key, value in saved.items())


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_what_a_truncated_checkpoint_lacks_is_named(prefix: str, single_rank_group: None) -> None:
    saved = {f"{prefix}{key}": value for key, value in Net().state_dict().items() if not key.startswith("norm.")}
    with pytest.raises(RuntimeError, match=r"loading state_dict for Net:\s*Missing key.*\"norm\.weight\"") as refused:
        replicated().load_state_dict(saved)
    assert "Unexpected key" not in str(refused.value) and "first" not in str(refused.value)


def test_a_checkpoint_of_another_model_is_refused_by_its_own_names(single_rank_group: None) -> None:
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"module\.layers\.0\"\."):
        replicated().load_state_dict({"module.layers.0": torch.zeros(3)})


@pytest.mark.parametrize("value", [None, "checkpoint.pt", 5, [("first.weight", None)]])
def test_what_is_no_state_dict_is_refused_as_by_the_module_itself(value: Any, single_rank_group: None) -> None:
    with pytest.raises(TypeError) as plain:
        Net().load_state_dict(value)
    with pytest.raises(TypeError) as ours:
        replicated().load_state_dict(value)
    assert str(ours.value) == str(plain.value)


def test_load_state_dict_by_assignment_is_refused(single_rank_group: None) -> None:
    with pytest.raises(ValueError, match="assign=False"):
        replicated().load_state_dict(Net().state_dict(), assign=True)


def backward(model: nn.Module) -> None:
    model(torch.randn(4, 6)).square().mean().backward()


def assert_plain(copied: nn.Module, model: nn.Module) -> None:
    assert type(copied) is Net
    assert all(
        torch.equal(a, b) for a, b in zip(copied.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert all(p is not q for p, q in zip(copied.parameters(), model.parameters(), strict=True))
    assert not any(name.startswith("_ddp_compile") for name in vars(copied))
    # Its gradients are its own: the reducer does not hear of them.
    backward(copied)
    assert all(p.grad is not None for p in copied.parameters())


def test_deepcopy_is_a_plain_module(single_rank_group: None) -> None:
    model = replicated()
    backward(model)
    assert_plain(copy.deepcopy(model), model)
    holder = nn.ModuleList([model, model])
    twins = copy.deepcopy(holder)
    assert twins[0] is twins[1]


def test_pickle_and_save_give_a_plain_module(single_rank_group: None) -> None:
    model = replicated()
    backward(model)
    assert_plain(pickle.loads(pickle.dumps(model)), model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert_plain(torch.load(buffer, weights_only=False), model)


def test_unwrap_gives_the_plain_module_back(single_rank_group: None) -> None:
    model = replicated()
    backward(model)
    gradients = [p.grad.clone() for p in model.parameters()]
    plain = model.unwrap()
    assert plain is model and type(plain) is Net and not hasattr(plain, "bucket_plan")
    assert all(torch.equal(p.grad, g) for p, g in zip(plain.parameters(), gradients, strict=True))
    backward(plain)
    backward(ddp_compile(plain, backend="eager"))


def test_require_backward_grad_sync_nests_with_no_sync_as_ddps(single_rank_group: None) -> None:
    seen: list[list[bool]] = []
    for model in (replicated(), nn.parallel.DistributedDataParallel(Net())):
        values = [model.require_backward_grad_sync]
        with model.no_sync():
            values.append(model.require_backward_grad_sync)
            model.require_backward_grad_sync = True
            values.append(model.require_backward_grad_sync)
        values.append(model.require_backward_grad_sync)
        model.require_backward_grad_sync = False
        with model.no_sync():
            pass
        values.append(model.require_backward_grad_sync)
        seen.append(values)
    assert seen[0] == seen[1] == [True, False, True, True, False]


def test_require_backward_grad_sync_leaves_nothing_behind(single_rank_group: None) -> None:
    model = replicated()
    model.require_backward_grad_sync = False
    backward(model)
    assert model._ddp_compile_state.builder.sealed is None
    assert not hasattr(copy.deepcopy(model), "require_backward_grad_sync")
    assert not hasattr(model.unwrap(), "require_backward_grad_sync")


@pytest.mark.parametrize("isolated", [True, False], ids=["isolate_recompiles", "torch before 2.13"])
def test_twelve_models_of_one_class_are_all_compiled(
    isolated: bool, single_rank_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isolated and not torch_internals.has_isolated_recompiles():
        pytest.skip("this torch has no isolate_recompiles")
    monkeypatch.setattr(torch_internals.dynamo, "has_isolated_recompiles", lambda: isolated)
    counters = [CompileCounter() for _ in range(12)]
    for counter in counters:
        model = ddp_compile(Net(), backend=counter)
        backward(model)
    assert [counter.frame_count for counter in counters] == [1] * 12


def test_evaluation_and_training_have_graphs_of_their_own(single_rank_group: None) -> None:
    model = replicated(bucket_cap_mb=1e-5)
    model.eval()
    model(torch.randn(4, 6))
    with torch.no_grad():
        model(torch.randn(4, 6))
    assert model._ddp_compile_state.backend.reports == []
    model.train()
    backward(model)
    (report,) = model._ddp_compile_state.backend.reports
    assert report.num_partitions == 3


def test_a_training_graph_made_under_no_grad_is_not_split(single_rank_group: None) -> None:
    model = replicated(bucket_cap_mb=1e-5)
    with torch.no_grad():
        model(torch.randn(4, 6))
    assert model._ddp_compile_state.backend.reports == []


def test_gradients_are_reduced_when_the_model_is_fine_tuned_in_evaluation_mode(single_rank_group: None) -> None:
    model = replicated().eval()
    for _ in range(2):
        backward(model)
    assert model.bucket_plan is model._ddp_compile_state.builder.sealed


def test_a_whole_training_step_may_be_compiled(single_rank_group: None) -> None:
    model = replicated(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = copy.deepcopy(model)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)

    def step(net: nn.Module, sgd: torch.optim.Optimizer, x: Tensor) -> Tensor:
        sgd.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        sgd.step()
        return loss

    compiled = torch.compile(step, backend="eager")
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(4, 6)
        assert torch.allclose(compiled(model, optimizer, x), step(reference, reference_optimizer, x))
    assert len(model._ddp_compile_state.backend.reports) == 1


@pytest.mark.parametrize(
    "compile_again",
    [lambda model: torch.compile(model, backend="eager"), lambda model: model.compile() or model],
    ids=["torch.compile", "compile"],
)
def test_compiling_the_module_again_changes_nothing(
    compile_again: Callable[[nn.Module], nn.Module], single_rank_group: None
) -> None:
    model = replicated()
    backward(compile_again(model))
    assert len(model._ddp_compile_state.backend.reports) == 1
    assert model._ddp_compile_state.builder.sealed is not None


@pytest.mark.parametrize(
    "name",
    [
        "module",
        "broadcast_buffers",
        "scatter",
        "gather",
        "to_kwargs",
        "will_sync_module_buffers",
        "_get_ddp_logging_data",
        "_register_builtin_comm_hook",
        "_set_static_graph",
        "_update_process_group",
    ],
)
def test_a_method_of_ddps_that_is_not_here_is_an_attribute_error(name: str, single_rank_group: None) -> None:
    # Code that asks with hasattr() whether it was given a wrapper, to unwrap it, leaves the module as it is.
    assert hasattr(nn.parallel.DistributedDataParallel(Net()), name)
    with pytest.raises(AttributeError, match=f"'Net' object has no attribute '{name}'"):
        getattr(replicated(), name)


READ_OFF_DDP = [
    "process_group",
    "device",
    "device_type",
    "parameters_to_ignore",
    "bucket_bytes_cap",
    "gradient_as_bucket_view",
    "find_unused_parameters",
    "skip_all_reduce_unused_params",
    "static_graph",
]


@pytest.mark.filterwarnings("ignore:skip_all_reduce")
@pytest.mark.parametrize("settings", [{}, {"static_graph": True, "find_unused_parameters": False}])
def test_attributes_of_ddps_are_read_off_the_module(settings: dict[str, Any], single_rank_group: None) -> None:
    settings = {"bucket_cap_mb": 3, "gradient_as_bucket_view": True, **settings}
    model = replicated(**settings)
    wrapper = nn.parallel.DistributedDataParallel(Net(), **settings)
    for name in READ_OFF_DDP:
        assert getattr(model, name) == getattr(wrapper, name), name
    assert model.bucket_bytes_cap_list == [2**20, 3 * 2**20]
    assert not model.lazy_bucket_allocation and model.device_mesh is None
    mesh = init_device_mesh("cpu", (1,))
    assert ddp_compile(Net(), device_mesh=mesh, backend="eager").device_mesh is mesh
    assert not hasattr(model.unwrap(), "process_group")


class WithNamesOfItsOwn(nn.Module):
    device = "a constant of the class"

    def __init__(self) -> None:
        super().__init__()
        self.process_group = "an attribute"
        self.static_graph = nn.Linear(2, 2)
        self.register_buffer("device_type", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.static_graph(x) * self.device_type


def test_the_modules_own_names_go_before_those_of_ddp(single_rank_group: None) -> None:
    module = WithNamesOfItsOwn()
    layer = module.static_graph
    model = ddp_compile(module, backend="eager", fullgraph=True)
    assert (model.device, model.process_group) == ("a constant of the class", "an attribute")
    assert model.static_graph is layer and torch.equal(model.device_type, torch.ones(1))
    model(torch.ones(1, 2)).sum().backward()
    model.find_unused_parameters = "given later"
    assert model.find_unused_parameters == "given later" and copy.deepcopy(model).find_unused_parameters
    assert "bucket_bytes_cap" not in vars(model) and not hasattr(copy.deepcopy(model), "bucket_bytes_cap")


class LooksInside(nn.Module):
    """Finds what it does not have itself in the layer that it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.static_graph = "the layer's"  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_what_the_module_finds_by_itself_goes_before(single_rank_group: None) -> None:
    model = ddp_compile(LooksInside(), backend="eager")
    assert model.static_graph == "the layer's" and not model.find_unused_parameters


def test_a_backward_is_finalized_by_hand_only_where_that_was_asked_for(single_rank_group: None) -> None:
    model = replicated()
    assert not model.require_manual_backward_finalization and not model.should_finalize_after_backward
    with pytest.raises(RuntimeError, match=r"rank 0: .*backwards end by themselves; set model.require_manual"):
        model.finalize_backward()
    model(torch.ones(2, 6)).sum().backward()
    model.require_manual_backward_finalization = True
    assert model.require_manual_backward_finalization and model.should_finalize_after_backward
    with pytest.raises(RuntimeError, match=r"no backward that is reduced has come .*outside of no_sync"):
        model.finalize_backward()
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(RuntimeError, match=r"finalization = False was set while .*; set it before a forward"):
        model.require_manual_backward_finalization = False
    model.finalize_backward()
    model.require_manual_backward_finalization = False
    model(torch.ones(2, 6)).sum().backward()
    model(torch.ones(2, 6)).sum().backward()


def test_a_backward_is_not_finalized_inside_itself(single_rank_group: None) -> None:
    model = replicated()
    model.require_manual_backward_finalization = True
    x = torch.ones(2, 6, requires_grad=True)
    x.register_hook(lambda _: model.finalize_backward())
    loss = model(x).sum()
    model.first.weight.register_hook(lambda _: None)
    with pytest.raises(RuntimeError, match=r"call it (once )?behind"):
        loss.backward()


def test_hooks_on_the_module_run_once_a_call(single_rank_group: None) -> None:
    calls: list[str] = []
    model = Net()
    model.register_forward_pre_hook(lambda module, args: calls.append("pre"))
    model.register_forward_hook(lambda module, args, output: calls.append("post"))
    model = ddp_compile(model, backend="eager")
    for _ in range(2):
        backward(model)
    assert calls == ["pre", "post"] * 2


def test_a_model_inside_another_module_is_called_through_its_own_reducer(single_rank_group: None) -> None:
    model = replicated()
    holder = nn.Sequential(nn.Linear(6, 6), model)
    backward(holder)
    assert model._ddp_compile_state.builder.sealed is not None


def test_fullgraph_holds_with_buffers_to_broadcast(single_rank_group: None) -> None:
    backward(replicated(fullgraph=True, broadcast_buffers=True))


def test_compile_settings_reach_the_inner_backend(single_rank_group: None) -> None:
    seen: list[dict[str, Any]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor], **settings: Any) -> Any:
        seen.append(settings)
        return gm.forward

    backward(replicated(backend=backend, options={"level": 3}))
    assert seen == [{"options": {"level": 3}}]


def collected(make_dead: Callable[[nn.Module], Any]) -> None:
    model = replicated(bucket_cap_mb=1e-5)
    backward(model)
    references = [weakref.ref(model._ddp_compile_state), weakref.ref(model._ddp_compile_state.reducer)]
    kept = make_dead(model)
    references += [] if kept is not None else [weakref.ref(model), weakref.ref(model.first.weight)]
    del model
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_a_model_that_is_let_go_is_freed_with_its_reducer(single_rank_group: None) -> None:
    collected(lambda model: None)


def _num_fake_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), FakeTensor) for found in gc.get_objects())


def test_a_model_that_is_let_go_leaves_nothing_of_its_graphs(split: str, single_rank_group: None) -> None:
    left_after = []
    for _ in range(5):
        model = replicated(split=split, bucket_cap_mb=1e-4, backend="aot_eager")
        model(torch.randn(4, 6)).sum().backward()
        del model
        left_after.append(_num_fake_tensors())
    # torch keeps what belongs to the latest one, more or less; each one that is kept would be 50 and more.
    assert left_after[4] - left_after[0] < 50


def test_unwrap_frees_the_reducer(single_rank_group: None) -> None:
    collected(lambda model: model.unwrap())


class WithCall(Net):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


def test_a_call_of_the_users_own_is_kept(single_rank_group: None) -> None:
    torch.manual_seed(0)
    plain = WithCall().eval()
    model = ddp_compile(copy.deepcopy(plain), backend="eager")
    x = torch.randn(4, 6)
    assert torch.equal(model(x), plain(x))


class CallsItsArgumentModule(nn.Linear):
    def forward(self, x: Tensor, module: int = 1, self_: int = 1) -> Tensor:
        return super().forward(x) * module


def test_forward_may_take_an_argument_called_module(single_rank_group: None) -> None:
    model = ddp_compile(CallsItsArgumentModule(6, 3), backend="eager")
    model(torch.randn(4, 6), module=2).sum().backward()


class Versioned(nn.Linear):
    _version = 2

    def _load_from_state_dict(self, state_dict: dict, prefix: str, metadata: dict, *rest: Any) -> None:
        if metadata.get("version") != 2:
            raise AssertionError("taken for a checkpoint of version 1")
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.parallel.DistributedDataParallel, torch.compile])
def test_versions_in_checkpoints_survive(wrap: Callable[[nn.Module], nn.Module], single_rank_group: None) -> None:
    saved = wrap(nn.Sequential(Versioned(3, 3))).state_dict()
    model = ddp_compile(nn.Sequential(Versioned(3, 3)), backend="eager")
    model.load_state_dict(saved)
    assert torch.equal(model[0].weight, next(iter(saved.values())))


def test_prefixes_that_are_the_models_own_stay(single_rank_group: None) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(3, 3)

    model = ddp_compile(Holder(), backend="eager")
    model.load_state_dict(model.state_dict())
    wrapped = {f"module.{key}": value for key, value in model.state_dict().items()}
    assert not model.load_state_dict(wrapped).missing_keys


def test_slices_and_siblings_are_plain(single_rank_group: None) -> None:
    model = ddp_compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), backend="eager")
    assert type(model[:2]) is nn.Sequential
    assert type(type(model)(nn.Linear(2, 2))) is nn.Sequential


class Registered(Net):
    registry: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, tag: str) -> None:
        Registered.registry[tag] = cls


class Child(Registered, tag="child"):
    pass


def test_a_registry_of_subclasses_does_not_hear_of_ours(single_rank_group: None) -> None:
    ddp_compile(Child(), backend="eager")
    assert Registered.registry == {"child": Child}


def test_a_method_that_calls_forward_itself_is_reduced(single_rank_group: None) -> None:
    model = replicated()
    model.forward(torch.randn(4, 6)).sum().backward()
    assert model._ddp_compile_state.builder.sealed is not None
