"""Every wrong setting ends in an error that names it and says what to do."""

import importlib
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ReplicationError, ddp_compile
from ddp_compile.algorithms import AlgorithmConfig, Decentralized, LowPrecisionDecentralized
from ddp_compile.config import DDP_ARGUMENTS_REPLACED, ReplicateConfig
from ddp_compile.module.module_checks import check_devices, resolve_process_group
from ddp_compile.runtime.comm import streams

pytestmark = pytest.mark.usefixtures("single_rank_group")


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"bucket_cap_mb": []}, ValueError, "bucket_cap_mb=[] has no capacity"),
        ({"bucket_cap_mb": [1, 0]}, ValueError, "bucket_cap_mb[1]=0 must be"),
        ({"first_bucket_cap_mb": 0}, ValueError, "first_bucket_cap_mb=0 must be"),
        ({"bucket_cap_mb": "auto"}, ValueError, "='auto' is not a number of MiB: a plan no longer"),
        ({"max_bucket_cap_mb": 50}, TypeError, "pass bucket_plan='plan.json', see docs/planning.md"),
        ({"backend": 5}, ValueError, "backend=5 is neither a name nor a function"),
        ({"dynamic": "yes"}, ValueError, "dynamic='yes' is not known"),
        ({"options": {"keep_output_stride": False}}, ValueError, "keep_output_stride"),
        ({"device_mesh": 5}, ValueError, "device_mesh=5 is not a DeviceMesh"),
        ({"split": "sideways"}, ValueError, "split='sideways' is not known; pass one of 'auto', 'forward', 'backward'"),
        ({"backend": "inductr"}, ValueError, "backend='inductr' is not known; did you mean 'inductor'? Or pass a"),
        ({"mode": "fastest"}, ValueError, "mode='fastest' is not known; pass one of"),
        ({"options": {"no_such_option": 1}}, ValueError, "no_such_option"),
        ({"parameters_to_ignore": ["weihgt"]}, ValueError, "parameters_to_ignore names weihgt"),
        ({"parameters_to_ignore": "weight"}, TypeError, "pass a list of names: ['weight']"),
        ({"process_group": -100}, ValueError, "process_group=-100 is not a process group that this rank belongs to"),
        ({"find_unused_parameters": 1}, ValueError, "find_unused_parameters=1 is neither True nor False"),
        ({"check_finite_gradients": True}, TypeError, "pass error_if_nonfinite=True to model.clip_grad_norm_"),
        ({"bucket_cap": 25}, TypeError, "unexpected keyword argument 'bucket_cap'; did you mean bucket_cap_mb"),
        ({"device_id": 0}, TypeError, "did you mean device_ids"),
        ({"compile_evaluation": 0}, ValueError, "compile_evaluation=0 is not known; pass True, False or 'auto'"),
    ],
)
def test_settings(settings: dict[str, Any], error: type[Exception], said: str) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(error, match=re.escape(said)):
        ddp_compile(model, **settings)
    assert type(model) is nn.Linear


class HasJoin(nn.Linear):
    def join(self) -> None:
        """Something else than ours."""


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DistributedDataParallel(nn.Linear(3, 3)), "the module is a DistributedDataParallel; pass the"),
        (lambda: torch.compile(nn.Linear(3, 3)), "the module is an OptimizedModule"),
        (lambda: ddp_compile(nn.Linear(3, 3)), "called twice"),
        (lambda: nn.Sequential(ddp_compile(nn.Linear(3, 3))), "submodule 0 is a ReplicatedModule"),
        (lambda: torch.jit.script(nn.Linear(3, 3)), "TorchScript"),
        (lambda: nn.Linear(3, 3).requires_grad_(False), "no parameter that requires a gradient"),
        (nn.ReLU, "no parameter that requires a gradient"),
        (lambda: nn.LazyLinear(3), "weight has no shape yet; run one forward"),
        (lambda: nn.Linear(3, 3, device="meta"), "weight is on the meta device"),
        (lambda: HasJoin(3, 3), "HasJoin.join has the name of a method that ddp_compile adds"),
    ],
)
def test_modules(make: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        ddp_compile(make())
    assert isinstance(refused.value, RuntimeError)


class BufferElsewhere(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        with FakeTensorMode():
            self.register_buffer("elsewhere", torch.ones(2, device="xpu"))


def on(device: str) -> nn.Module:
    """As if there were such a device."""
    with FakeTensorMode():
        return nn.ParameterDict({"weight": torch.empty(3, device=device)})


NOT_ON_XPU = "is on xpu:0, but the process group sends tensors on cpu and cuda only (backend 'gloo')"
NOT_ON_MPS = "is on mps:0, and torch.mps has no streams"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: on("mps"), f"rank 0: weight {NOT_ON_MPS}"),
        (lambda: on("xpu"), f"rank 0: weight {NOT_ON_XPU}"),
        (BufferElsewhere, f"rank 0: elsewhere {NOT_ON_XPU}"),
        (
            lambda: nn.Sequential(nn.Linear(3, 3), on("xpu")),
            "rank 0: 0.weight is on cpu, 1.weight is on xpu:0; all reduced parameters must",
        ),
    ],
)
def test_devices(make: Callable[[], nn.Module], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(streams.backend._has_streams, "xpu", True)  # which this build of torch does not know
    with pytest.raises(ReplicationError, match=re.escape(said)):
        ddp_compile(make())


@pytest.mark.parametrize("algorithm", [Decentralized(peer_selection="shift_one"), LowPrecisionDecentralized()])
def test_point_to_point_on_gloo(algorithm: AlgorithmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "has_streams", lambda device: True)  # the CPU stands for an accelerator
    said = r"^rank 0: the (low-precision )?decentralized average .* sends point-to-point messages, for which gloo takes"
    with pytest.raises(ReplicationError, match=said):
        ddp_compile(nn.Linear(3, 3), algorithm=algorithm)


@pytest.mark.parametrize(
    ("settings", "is_sent"),
    [
        ({"init_sync": False, "broadcast_buffers": False}, False),
        ({"parameters_to_ignore": frozenset({"elsewhere"})}, False),
        ({"init_sync": False}, True),
        ({"broadcast_buffers": False}, True),
    ],
)
def test_devices_of_what_is_not_sent(settings: dict[str, Any], is_sent: bool) -> None:
    config = ReplicateConfig(caps_bytes=(1,), **settings)
    group = resolve_process_group(None, None)
    with pytest.raises(ReplicationError, match="elsewhere") if is_sent else nullcontext():
        check_devices(BufferElsewhere(), config, group)


def test_groups() -> None:
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match="process_group cannot be used with device_mesh: "):
        ddp_compile(nn.Linear(3, 3), process_group=mesh.get_group(), device_mesh=mesh)
    with pytest.raises(ValueError, match="2 dimensions"):
        ddp_compile(nn.Linear(3, 3), device_mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")))


@pytest.mark.parametrize("name", DDP_ARGUMENTS_REPLACED)
def test_arguments_of_ddp(name: str) -> None:
    # 0 names a device and is not taken for False, but is the default of ``dim``.
    value = {"dim": 1, "forward_sync_buffers": False}.get(name, 0)
    with pytest.raises(TypeError, match=re.escape(f"{name}={value!r}; {DDP_ARGUMENTS_REPLACED[name]}")):
        ddp_compile(nn.Linear(3, 3), **{name: value})


def test_argument_of_a_newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def newer(self: object, module: nn.Module, brand_new: bool = False) -> None: ...

    monkeypatch.setattr(DistributedDataParallel, "__init__", newer)
    with pytest.raises(TypeError, match=r"does not take brand_new=True; .*in torch 2.*: drop it, or leave it False"):
        ddp_compile(nn.Linear(3, 3), brand_new=True)
    for value in (3, None, False):
        with pytest.raises(TypeError, match="unexpected keyword argument 'never_heard_of'"):
            ddp_compile(nn.Linear(3, 3), never_heard_of=value)
    ddp_compile(nn.Linear(3, 3), brand_new=False)


def test_positional_arguments() -> None:
    said = "[0] is in the position of DistributedDataParallel's device_ids: move the module to its device first"
    with pytest.raises(TypeError, match=re.escape(said)):
        ddp_compile(nn.Linear(3, 3), [0])
    with pytest.raises(TypeError, match=r"a ProcessGroup is second; write process_group=\.\.\."):
        ddp_compile(nn.Linear(3, 3), dist.group.WORLD)
    with pytest.raises(TypeError, match=r"a Linear is second; pass it first: ddp_compile\(module, \.\.\.\)"):
        ddp_compile(dist.group.WORLD, nn.Linear(3, 3))
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module, not function"):
        ddp_compile(lambda x: x)


def test_module_that_is_gone() -> None:
    with pytest.raises(ImportError, match=r"comm_hooks is gone: .*algorithm=GradientAllReduce\(wire_dtype"):
        importlib.import_module("ddp_compile.comm_hooks")
