"""The returned module is the user's own: same object, names and class. A copy of it is plain. Methods as functions."""

import copy
import gc
import inspect
import io
import logging
import pickle
import re
import weakref
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from in_ci import only
from small_net import Net, backward, replicated
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensor

from ddp_compile import ReplicationError, ddp_compile, explain, is_replicated, no_sync, torch_internals, unwrap

pytestmark = pytest.mark.usefixtures("single_rank_group")


def test_same_object() -> None:
    net = Net()
    first = net.first
    model = ddp_compile(net, backend="eager")
    assert model is net and model.first is first
    assert isinstance(model, Net) and model.number_of_layers() == 2
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(model), name) == getattr(Net, name)
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)


def assert_plain(copied: nn.Module, model: nn.Module) -> None:
    assert type(copied) is Net
    assert all(
        torch.equal(a, b) for a, b in zip(copied.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert all(p is not q for p, q in zip(copied.parameters(), model.parameters(), strict=True))
    assert not any(name.startswith("_ddp_compile") for name in vars(copied))
    # Its gradients are separate: the reducer does not see them.
    backward(copied)
    assert all(p.grad is not None for p in copied.parameters())


def test_deepcopy() -> None:
    model = replicated()
    backward(model)
    assert_plain(copy.deepcopy(model), model)
    holder = nn.ModuleList([model, model])
    twins = copy.deepcopy(holder)
    assert twins[0] is twins[1]


def test_pickle() -> None:
    model = replicated()
    backward(model)
    assert_plain(pickle.loads(pickle.dumps(model)), model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert_plain(torch.load(buffer, weights_only=False), model)


def test_unwrap() -> None:
    model = replicated()
    backward(model)
    gradients = [p.grad.clone() for p in model.parameters()]
    plain = model.unwrap()
    assert plain is model and type(plain) is Net and not hasattr(plain, "bucket_plan")
    assert all(torch.equal(p.grad, g) for p, g in zip(plain.parameters(), gradients, strict=True))
    backward(plain)
    backward(ddp_compile(plain, backend="eager"))


@pytest.mark.parametrize("isolated", only([True], [True, False]), ids=["isolate_recompiles", "torch before 2.13"])
def test_twelve_models_of_one_class(isolated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if isolated and not torch_internals.has_isolated_recompiles():
        pytest.skip("this torch has no isolate_recompiles")
    monkeypatch.setattr(torch_internals.dynamo, "has_isolated_recompiles", lambda: isolated)
    counters = [CompileCounter() for _ in range(12)]
    for counter in counters:
        model = ddp_compile(Net(), backend=counter)
        backward(model)
    assert [counter.frame_count for counter in counters] == [1] * 12


def test_graphs_of_evaluation() -> None:
    model = replicated(bucket_cap_mb=1e-5)
    with torch.no_grad():
        model(torch.randn(4, 6))
    model.eval()
    model(torch.randn(4, 6))
    with torch.no_grad():
        model(torch.randn(4, 6))
    assert model.explain().graphs == ()
    model.train()
    backward(model)
    (graph,) = model.explain().graphs
    assert len(graph.partitions) == 3


def test_compiled_again() -> None:
    for compile_again in (lambda model: torch.compile(model, backend="eager"), lambda model: model.compile() or model):
        model = replicated()
        backward(compile_again(model))
        assert len(model.explain().graphs) == 1


def test_module_hooks() -> None:
    calls: list[str] = []
    model = Net()
    model.register_forward_pre_hook(lambda module, args: calls.append("pre"))
    model.register_forward_hook(lambda module, args, output: calls.append("post"))
    model = ddp_compile(model, backend="eager")
    for _ in range(2):
        backward(model)
    assert calls == ["pre", "post"] * 2


def test_fullgraph_with_buffers() -> None:
    backward(replicated(fullgraph=True, broadcast_buffers=True))


@pytest.mark.parametrize("unwraps", [False, True])
def test_reducer_is_freed(unwraps: bool) -> None:
    model = replicated(bucket_cap_mb=1e-5)
    backward(model)
    state = model._ddp_compile_state
    gone = [weakref.ref(state), weakref.ref(state.reducer)]
    kept = model.unwrap() if unwraps else None
    gone += [] if unwraps else [weakref.ref(model), weakref.ref(model.first.weight)]
    del model, state
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone) and (kept is not None) == unwraps


def test_graphs_are_freed(split: str) -> None:
    left_after = []
    for _ in range(5):
        model = replicated(split=split, bucket_cap_mb=1e-4, backend="aot_eager")
        model(torch.randn(4, 6)).sum().backward()
        del model
        gc.collect()
        left_after.append(sum(issubclass(type(found), FakeTensor) for found in gc.get_objects()))
    # torch keeps what belongs to the latest one, more or less; each one that is kept would be 50 and more.
    assert left_after[4] - left_after[0] < 50


class Registered(Net):
    registry: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, tag: str) -> None:
        Registered.registry[tag] = cls


class Child(Registered, tag="child"):
    pass


def test_init_subclass_is_not_called() -> None:
    ddp_compile(Child(), backend="eager")
    assert Registered.registry == {"child": Child}


@torch.compiler.set_stance("force_eager")
def test_calls_of_forward() -> None:
    for call in (lambda model, x: model.forward(x), lambda model, x: nn.Sequential(nn.Linear(6, 6), model)(x)):
        model = replicated()
        call(model, torch.randn(4, 6)).sum().backward()
        assert model.bucket_plan.generation == 1  # packed again after the first reduction


def test_functions_are_methods() -> None:
    model = replicated()
    assert is_replicated(model) and not is_replicated(Net()) and not is_replicated(nn.Sequential(model))
    with no_sync(model):
        assert not model.require_backward_grad_sync
        backward(model)
    assert model.require_backward_grad_sync
    backward(model)
    assert explain(model) == model.explain() and str(explain(model)).startswith("bucket ")
    assert unwrap(model) is model and type(model) is Net and not is_replicated(model)


@pytest.mark.parametrize("function", [no_sync, explain, unwrap])
def test_module_that_is_not_replicated(function: Callable[[nn.Module], object]) -> None:
    for module in (Net(), nn.Sequential(replicated()), copy.deepcopy(replicated())):
        kind = type(module).__name__
        said = f"{function.__name__}: model is a {kind} that is not replicated; call ddp_compile(model) first"
        with pytest.raises(ReplicationError, match=re.escape(said)):
            function(module)


class OwnMethods(Net):
    def explain(self) -> str:
        return "its author's"

    @property
    def no_sync(self) -> str:
        return "a property"


def test_own_methods(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ddp_compile"):
        model = ddp_compile(OwnMethods(), backend="eager", fullgraph=True)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"rank 0: model.{name} remains the attribute of OwnMethods; for that of ddp_compile, call the"
        f" function: from ddp_compile import {name}"
        for name in ("no_sync", "explain")
    ]
    assert (model.explain(), model.no_sync) == ("its author's", "a property")
    with no_sync(model):
        assert not model.require_backward_grad_sync
        backward(model)
    backward(model)
    assert "graph 0" in str(explain(model))
    assert model.unwrap() is model and model.explain() == "its author's"


class OwnRepr(nn.Linear):
    def __repr__(self) -> str:
        return "its author's"


def test_repr() -> None:
    plain = Net()
    keys = list(plain.state_dict())
    printed = repr(plain)
    model = ddp_compile(plain, split="none", backend="aot_eager")
    said = "ddp_compile(split='none', backend='aot_eager', world_size=1): "
    assert repr(model) == said + printed and list(model.state_dict()) == keys
    assert "(0): ddp_compile(split='none'" in repr(nn.Sequential(model))
    assert repr(copy.deepcopy(model)) == repr(unwrap(model)) == printed
    own = ddp_compile(OwnRepr(2, 2))
    assert repr(own) == "ddp_compile(split='auto', backend='inductor', world_size=1): its author's"
    by_function = replicated(backend=lambda gm, inputs: gm.forward)
    assert "<lambda>" in repr(by_function).splitlines()[0]
    by_function(torch.randn(4, 6))
