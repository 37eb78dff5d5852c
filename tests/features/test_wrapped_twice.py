"""Two wrappers that would reduce the same gradient are refused; the error names both and the way out."""

import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddp_compile import ReplicationError, ddp_compile, torch_internals

pytestmark = pytest.mark.usefixtures("single_rank_group")


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def replicated(module: nn.Module | None = None, **settings: Any) -> Any:
    return ddp_compile(two_layers() if module is None else module, backend="eager", **settings)


def backward(model: nn.Module) -> None:
    model(torch.randn(2, 4)).sum().backward()


class Task(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_shared_parameters() -> None:
    head = nn.Linear(4, 4)
    first, second = replicated(Task(head)), nn.Sequential(nn.Linear(4, 4), head)
    said = r"rank 0: .*: 1\.weight is head\.weight of a Task, 1\.bias is head\.bias of a Task\. .*once on a module"
    with pytest.raises(ReplicationError, match=said):
        replicated(second)
    assert type(second) is nn.Sequential
    backward(first)


@pytest.mark.parametrize("ignored", [True, False], ids=["ignored", "frozen"])
def test_parameters_of_one_module(ignored: bool) -> None:
    head = nn.Linear(4, 4).requires_grad_(ignored)
    models = [replicated(Task(head)), replicated(Task(head), parameters_to_ignore=["head.weight", "head.bias"])]
    for model in models:
        backward(model)


@pytest.mark.parametrize("end", [list.clear, lambda models: models[0].unwrap()], ids=["let go", "unwrapped"])
def test_parameters_are_free_again(end: Callable[[list[Any]], Any]) -> None:
    head = nn.Linear(4, 4)
    models = [replicated(Task(head))]
    backward(models[0])
    gc.disable()  # or it might have run by chance
    try:
        end(models)
        backward(replicated(Task(head)))
    finally:
        gc.enable()


# Another wrapper around, or instead of, a replicated module


def mesh() -> Any:
    return init_device_mesh("cpu", (1,))


def fsdp(module: nn.Module, **settings: Any) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **settings)


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "DDP": (DistributedDataParallel, "called by a DistributedDataParallel, which also takes 4 of its 4"),
    "DDP around a parent": (
        lambda m: DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), m)),
        "called by a DistributedDataParallel",
    ),
    "compiled DDP": (lambda m: torch.compile(DistributedDataParallel(m), backend="eager"), "DistributedDataParallel"),
    "DataParallel": (DataParallel, "called by a DataParallel"),
    "FSDP": (fsdp, "called by a FullyShardedDataParallel"),
    "FSDP with the same parameters": (lambda m: fsdp(m, use_orig_params=True), "called by a FullyShardedDataParallel"),
    "fully_shard": (lambda m: fully_shard(m, mesh=mesh()), "replicated is an FSDPModule"),
    "fully_shard of a parent": (lambda m: fully_shard(nn.Sequential(m), mesh=mesh()), "called by an FSDPModule"),
    "replicate": (replicate, "replicated is a DDP"),
    "replicate of a parent": (lambda m: replicate(nn.Sequential(m)), "called by a DDP"),
    "replicate_with_fsdp": (lambda m: replicate_with_fsdp(nn.Sequential(m)), "called by a ReplicateModule"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
def test_wrapper_around_a_replicated_module(wrapper: str, grad: bool) -> None:
    wrap, said = WRAPPERS[wrapper]
    model = wrap(replicated())
    said = f"rank 0: .*{re.escape(said)}.*accelerator.prepare.*DDPCompileStrategy"
    with torch.set_grad_enabled(grad), pytest.raises(ReplicationError, match=said):
        model(torch.randn(2, 4))


@pytest.fixture
def python_reducer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Under it DistributedDataParallel does not say that its forward is under way."""
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", None)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        yield
    torch._dynamo.trace_rules.LEGACY_MOD_INLINELIST.discard("torch.nn.parallel.distributed")
    torch._dynamo.trace_rules.get_legacy_mod_inlinelist.cache_clear()
    torch._inductor.config._fuse_ddp_communication = False


def test_python_reducer(python_reducer: None) -> None:
    model: Any = DistributedDataParallel(replicated())
    assert model._use_python_reducer and torch_internals.active_ddp() is None
    with pytest.raises(ReplicationError, match="called by a DistributedDataParallel"):
        backward(torch.compile(model, backend="eager"))


class Distilled(nn.Module):
    """Calls a module that is not one of its submodules."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.net, self._teacher = nn.Linear(4, 4), [teacher]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) - self._teacher[0](x)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, lambda m: fully_shard(m, mesh=mesh())])
def test_wrapped_caller(wrap: Callable[[nn.Module], nn.Module]) -> None:
    teacher = replicated()
    model = wrap(Distilled(teacher))
    for _ in range(3):
        backward(model)
    assert teacher[0].weight.grad is not None


def test_ignored_by_ddp() -> None:
    parent = nn.Sequential(nn.Linear(4, 4), replicated())
    names = [name for name, _ in parent.named_parameters() if name.startswith("1.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(parent, names)
    backward(DistributedDataParallel(parent))


def test_dataparallel_copies() -> None:
    with pytest.raises(ReplicationError, match=r"DataParallel cannot copy .* torchrun"):
        replicated()._replicate_for_data_parallel()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_already(wrapper: str) -> None:
    wrap, _ = WRAPPERS[wrapper]
    with pytest.raises(ReplicationError, match=r"the module is an? "):
        replicated(wrap(two_layers()))
    with pytest.raises(ReplicationError, match=r"submodule 0 is an? ") as refused:
        replicated(nn.Sequential(wrap(two_layers()), nn.Linear(4, 4)))
    if wrapper.startswith("fully_shard"):
        assert "HSDP, leave out ddp_compile: fully_shard(module, mesh=mesh['replicas', 'parts'])" in str(refused.value)
