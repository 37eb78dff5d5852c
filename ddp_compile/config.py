"""The settings of one ``ddp_compile`` call: checked once, then frozen."""

import difflib
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from ddp_compile.errors import with_article

SplitMode = Literal["auto", "forward", "backward", "none"]
EvaluationMode = Literal["auto", True, False]
#: "auto", or classes of modules.
RegionClasses = Literal["auto"] | Sequence[type[Module]]
#: What to do about parameters that differ between the ranks; False to compare none.
CheckReplicas = Literal["raise", "repair", False]

# Arguments of DistributedDataParallel in torch 2.11 to 2.15 that are refused here, and what to do instead. A test
# compares them with docs/ddp_parity.md.
DDP_ARGUMENTS_REPLACED: Mapping[str, str] = {
    "device_ids": "move the module to its device first: module.to(device), and drop device_ids",
    "output_device": "the output stays on the module's device; drop output_device",
    "dim": "drop dim: inputs are not scattered, every rank loads its own part of the batch",
    "check_reduction": "drop check_reduction: DistributedDataParallel ignores it too",
    "mixed_precision": (
        "use torch.autocast, and algorithm=GradientAllReduce(wire_dtype=torch.bfloat16) to send gradients"
        " in bfloat16; or build the module in the wanted dtype"
    ),
    "bucket_cap_mb_list": "give the list as bucket_cap_mb=[...]",
    "batched_grad_copy": "drop batched_grad_copy: a whole bucket is always copied at once",
    "forward_sync_buffers": "use broadcast_buffers=True or False",
}

_PLAN_BEFORE_TRAINING = (
    "a plan no longer changes while a model trains. Measure some steps, model.measure(); choose buckets by them,"
    " python -m ddp_compile plan --profile report.json --save plan.json; and pass bucket_plan='plan.json', see"
    " docs/planning.md"
)
# Arguments that this package once had.
_ARGUMENTS_REMOVED: Mapping[str, str] = {
    "max_bucket_cap_mb": _PLAN_BEFORE_TRAINING,
    "check_finite_gradients": (
        "pass error_if_nonfinite=True to model.clip_grad_norm_, which raises on every rank; max_norm may be infinite"
    ),
}


def refuse_positional_arguments(values: Sequence[Any]) -> None:
    """Raise a TypeError if anything but the module was given by position."""
    if not values:
        return
    kind = with_article(type(values[0]).__name__)
    if isinstance(values[0], Module):
        way_out = f"{kind} is second; pass it first: ddp_compile(module, ...)"
    elif isinstance(values[0], ProcessGroup | DeviceMesh):
        name = "device_mesh" if isinstance(values[0], DeviceMesh) else "process_group"
        way_out = f"{kind} is second; write {name}=..."
    else:
        way_out = f"{values[0]!r} is in the position of DistributedDataParallel's device_ids:"
        way_out += f" {DDP_ARGUMENTS_REPLACED['device_ids']}"
    raise TypeError(f"ddp_compile() takes the module by position and everything else by name; {way_out}")


def refuse_unknown_arguments(arguments: Mapping[str, Any], taken: Iterable[str] = ()) -> None:
    """Raise a TypeError for arguments that ``ddp_compile`` does not take, with advice.

    An argument of DistributedDataParallel is accepted if its value changes nothing (``None``, ``False``, ``dim=0``), so
    that calls written for it keep working. So is the default of an argument that is newer than this package. Names that
    are ``taken`` are suggested.
    """
    for name, value in arguments.items():
        if name in _ARGUMENTS_REMOVED:
            raise TypeError(f"ddp_compile() does not take {name}={value!r}: {_ARGUMENTS_REMOVED[name]}")
        if name not in DDP_ARGUMENTS_REPLACED:
            newer = inspect.signature(DistributedDataParallel).parameters.get(name)
            if newer is None:
                close = difflib.get_close_matches(name, [*taken, *DDP_ARGUMENTS_REPLACED], n=1)
                meant = f"; did you mean {close[0]}?" if close else ""
                raise TypeError(f"ddp_compile() got an unexpected keyword argument {name!r}{meant}")
            if value is newer.default:
                continue
            raise TypeError(
                f"ddp_compile() does not take {name}={value!r}; this version does not know that argument of"
                f" DistributedDataParallel in torch {torch.__version__}: drop it, or leave it {newer.default!r}"
            )
        if value is None or (name == "dim" and value == 0):
            continue
        if value is False and name != "forward_sync_buffers":  # False would turn off what is on by default here
            continue
        raise TypeError(f"ddp_compile() does not take {name}={value!r}; {DDP_ARGUMENTS_REPLACED[name]}")


@dataclass(frozen=True, slots=True)
class DelayedParameters:
    """Parameters whose gradients are averaged after that of another one, the trigger, has come."""

    named: Mapping[str, Parameter] = field(default_factory=dict)
    trigger: Parameter | None = None
    trigger_name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicateConfig:
    """The settings of one replicated module; see `ddp_compile.ddp_compile` for those that are not explained here."""

    #: Bucket capacities in bytes in launch order. The last one holds for all further buckets.
    caps_bytes: tuple[int, ...]
    split: SplitMode = "auto"
    broadcast_buffers: bool = True
    init_sync: bool = True
    gradient_as_bucket_view: bool = True
    lazy_bucket_allocation: bool = False
    find_unused_parameters: bool = False
    skip_all_reduce_unused_params: bool = False
    static_graph: bool = False
    parameters_to_ignore: frozenset[str] = frozenset()
    #: Parameters that are averaged outside the reducer.
    delayed: DelayedParameters = field(default_factory=DelayedParameters)
    device_mesh: DeviceMesh | None = None
    compile_evaluation: EvaluationMode = "auto"
    regions: RegionClasses | None = None
    bucket_plan: str | os.PathLike[str] | None = None
    check_replicas: CheckReplicas = "raise"
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.split not in get_args(SplitMode):
            known = ", ".join(repr(mode) for mode in get_args(SplitMode))
            raise ValueError(f"split={self.split!r} is not known; pass one of {known}")
        if self.compile_evaluation != "auto" and not isinstance(self.compile_evaluation, bool):
            raise ValueError(f"compile_evaluation={self.compile_evaluation!r} is not known; pass True, False or 'auto'")
        if self.regions is not None:
            _check_regions(self.regions)
        if self.check_replicas is not False and self.check_replicas not in ("raise", "repair"):
            raise ValueError(f"check_replicas={self.check_replicas!r} is not known; pass 'raise', 'repair' or False")
        if self.reduce_dtype not in (None, torch.float32):
            raise ValueError(
                f"reduce_dtype={self.reduce_dtype!r}: pass torch.float32, or None for the dtype of each parameter; to"
                " send fewer bytes, algorithm=GradientAllReduce(wire_dtype=torch.bfloat16)"
            )
        for each in fields(self):
            if each.type is bool and not isinstance(value := getattr(self, each.name), bool):
                raise ValueError(f"{each.name}={value!r} is neither True nor False; pass one of them")


def _check_regions(regions: RegionClasses) -> None:
    is_list = isinstance(regions, Sequence) and not isinstance(regions, str)
    if regions != "auto" and not (
        is_list and regions and all(isinstance(c, type) and issubclass(c, Module) for c in regions)
    ):
        raise ValueError(f"regions={regions!r} is neither 'auto' nor a list of module classes such as [Block]")


# On two CPU ranks (benchmarks/README.md), 5 MiB instead of 25 MiB saves a tenth of a step at 1 Gbit/s, and makes no
# measurable difference on a fast link. On GPUs, starting a collective is a larger part of its cost, so the value is
# that of DistributedDataParallel (Li et al. 2020, "PyTorch Distributed", section 5.2).
DEFAULT_CAP_MIB: Mapping[str, float] = {"cpu": 5.0, "cuda": 25.0}
# A ring cuts a bucket into a part for each rank, and a part must not be so small that its latency counts most: so the
# default on accelerators grows with the ranks from 200 on. Megatron-LM does the same, with a million parameters for
# each rank (`bucket_size` of its DistributedDataParallelConfig). docs/planning.md has the predictions for this value.
_LEAST_MIB_FOR_EACH_RANK = 0.125


def caps_from_mib(
    bucket_cap_mb: float | Sequence[float] | None, first_bucket_cap_mb: float, device_type: str, world_size: int = 1
) -> tuple[int, ...]:
    """Bucket capacities in bytes from the arguments of ``ddp_compile``; the last one is for all further buckets."""
    first_cap = cap_bytes_from_mib("first_bucket_cap_mb", first_bucket_cap_mb)
    if bucket_cap_mb is None:
        bucket_cap_mb = DEFAULT_CAP_MIB.get(device_type, DEFAULT_CAP_MIB["cuda"])
        if device_type != "cpu":
            bucket_cap_mb = max(bucket_cap_mb, _LEAST_MIB_FOR_EACH_RANK * world_size)
    if isinstance(bucket_cap_mb, list | tuple):  # then the first capacity does not count
        if not bucket_cap_mb:
            raise ValueError("bucket_cap_mb=[] has no capacity; pass bucket_cap_mb=25 (MiB) or a list such as [1, 25]")
        return tuple(cap_bytes_from_mib(f"bucket_cap_mb[{i}]", cap) for i, cap in enumerate(bucket_cap_mb))
    cap = cap_bytes_from_mib("bucket_cap_mb", bucket_cap_mb)
    return (min(first_cap, cap), cap)


def in_mib(caps_bytes: Sequence[int]) -> str:
    """Capacities for a message: ``"1, then 25 MiB"``."""
    return f"{', then '.join(f'{cap / 2**20:g}' for cap in caps_bytes)} MiB"


def cap_bytes_from_mib(setting: str, mib: Any) -> int:
    """A capacity or limit in bytes, which ``setting`` names in errors; a ValueError unless finite and above zero."""
    if isinstance(mib, str) and mib == "auto":
        raise ValueError(f"{setting}='auto' is not a number of MiB: {_PLAN_BEFORE_TRAINING}")
    if isinstance(mib, bool) or not isinstance(mib, int | float) or not 0 < mib < float("inf"):
        default = 1 if setting.startswith("first") else 25
        said = f"{setting}={mib!r} must be a positive and finite number of MiB"
        raise ValueError(f"{said}; pass for example {setting}={default}")
    return max(1, int(mib * 2**20))
