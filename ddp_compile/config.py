"""The settings of one ``ddp_compile`` call, checked once and frozen."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

SplitMode = Literal["auto", "forward", "backward", "none"]
EvaluationMode = Literal["auto", True, False]
#: "auto", or classes of modules.
RegionClasses = Literal["auto"] | Sequence[type[Module]]

_MIB = 1024 * 1024

# Arguments of DistributedDataParallel, of torch 2.11 to 2.15, that have another name here, or none, and what to do
# instead. docs/ddp_parity.md lists all of them, and a test compares the two.
DDP_ARGUMENTS_REPLACED: Mapping[str, str] = {
    "device_ids": "move the module to its device first: module.to(device), and drop device_ids",
    "output_device": "the output stays on the module's device; drop output_device",
    "dim": "drop dim: inputs are not scattered, every rank loads its own part of the batch",
    "check_reduction": "drop check_reduction: DistributedDataParallel ignores it as well",
    "mixed_precision": (
        "use torch.autocast, and register_comm_hook(None, ddp_compile.comm_hooks.bf16_compress_hook) to send gradients"
        " in bfloat16; or build the module in the wanted dtype"
    ),
    "bucket_cap_mb_list": "give the list as bucket_cap_mb=[...]",
    "batched_grad_copy": "drop batched_grad_copy: a whole bucket is always copied at once",
    "forward_sync_buffers": "use broadcast_buffers=True or False",
}


def refuse_positional_arguments(values: Sequence[Any]) -> None:
    """Raise a TypeError that names what was given by position beside the module, and says what to write."""
    if not values:
        return
    raise TypeError(
        f"ddp_compile() takes the module by position and everything else by name; {values[0]!r} stands where"
        f" DistributedDataParallel takes device_ids: {DDP_ARGUMENTS_REPLACED['device_ids']}"
    )


def refuse_unknown_arguments(arguments: Mapping[str, Any], taken: Iterable[str] = ()) -> None:
    """Raise a TypeError that says what to write instead of an argument that ``ddp_compile`` does not take.

    Arguments of DistributedDataParallel that are given with the value that changes nothing (``None``, ``False``,
    ``dim=0``) are let through, so that a call written for it keeps working; so are defaults of arguments that only a
    torch has that is newer than this package.

    Args:
        arguments: They, by name.
        taken: The names that it takes, one of which may have been meant.
    """
    for name, value in arguments.items():
        if name not in DDP_ARGUMENTS_REPLACED:
            newer = inspect.signature(DistributedDataParallel).parameters.get(name)
            if newer is None:
                close = difflib.get_close_matches(name, [*taken, *DDP_ARGUMENTS_REPLACED], n=1)
                meant = f"; did you mean {close[0]}?" if close else ""
                raise TypeError(f"ddp_compile() got an unexpected keyword argument {name!r}{meant}")
            if value is newer.default:
                continue
            raise TypeError(
                f"ddp_compile() does not take {name}={value!r}; this version of it does not know that argument, which"
                f" DistributedDataParallel of torch {torch.__version__} has: drop it, or leave it {newer.default!r}"
            )
        if value is None or (name == "dim" and value == 0):
            continue
        if value is False and name != "forward_sync_buffers":  # its False turns something off that is on here
            continue
        raise TypeError(f"ddp_compile() does not take {name}={value!r}; {DDP_ARGUMENTS_REPLACED[name]}")


@dataclass(frozen=True, slots=True)
class DelayedParameters:
    """Parameters whose gradients are averaged when another one has come.

    Args:
        named: They, by name; most often none.
        trigger: The parameter whose gradient is waited for.
        trigger_name: Its name.
    """

    named: Mapping[str, Parameter] = field(default_factory=dict)
    trigger: Parameter | None = None
    trigger_name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicateConfig:
    """What one replicated module was asked to do.

    Args:
        caps_bytes: Bucket capacities in bytes in launch order; the last one holds for all further buckets.
        split: How backward graphs are made to hand over buckets early.
        broadcast_buffers: Broadcast rank 0's buffers before each synchronised forward with gradients.
        init_sync: Broadcast rank 0's parameters and buffers once, when the module is replicated.
        gradient_as_bucket_view: ``.grad`` is a view into the bucket's flat buffer; otherwise results are copied back.
        lazy_bucket_allocation: Flat buffers are allocated in each backward, and let go when it ends.
        find_unused_parameters: Parameters may stay without a gradient, others in each backward and on each rank.
        skip_all_reduce_unused_params: Buckets that no rank uses in the first iteration are not sent again.
        static_graph: The same gradients come in every iteration, as often as in the first one.
        check_finite_gradients: Every rank raises if a gradient of any rank is infinite or NaN.
        parameters_to_ignore: Fully qualified names of parameters and buffers that stay local.
        delayed: Those that the reducer leaves out, and that are averaged all the same.
        device_mesh: The mesh that the ranks were given as, if they were.
        compile_evaluation: Whether forwards without gradients are compiled; "auto": but for those of ``generate``.
        regions: Which submodules are compiled by themselves, in place of the whole module; None for none.
    """

    caps_bytes: tuple[int, ...]
    split: SplitMode = "auto"
    broadcast_buffers: bool = True
    init_sync: bool = True
    gradient_as_bucket_view: bool = True
    lazy_bucket_allocation: bool = False
    find_unused_parameters: bool = False
    skip_all_reduce_unused_params: bool = False
    static_graph: bool = False
    check_finite_gradients: bool = False
    parameters_to_ignore: frozenset[str] = frozenset()
    delayed: DelayedParameters = field(default_factory=DelayedParameters)
    device_mesh: DeviceMesh | None = None
    compile_evaluation: EvaluationMode = "auto"
    regions: RegionClasses | None = None

    def __post_init__(self) -> None:
        if self.split not in get_args(SplitMode):
            known = ", ".join(repr(mode) for mode in get_args(SplitMode))
            raise ValueError(f"split={self.split!r} is not known; pass one of {known}")
        if self.compile_evaluation != "auto" and not isinstance(self.compile_evaluation, bool):
            raise ValueError(f"compile_evaluation={self.compile_evaluation!r} is not known; pass True, False or 'auto'")
        if self.regions is not None:
            _check_regions(self.regions, self.split)
        for name in (
            "broadcast_buffers",
            "init_sync",
            "gradient_as_bucket_view",
            "lazy_bucket_allocation",
            "find_unused_parameters",
            "skip_all_reduce_unused_params",
            "static_graph",
            "check_finite_gradients",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is neither True nor False; pass one of them")


def _check_regions(regions: RegionClasses, split: SplitMode) -> None:
    if regions != "auto":
        is_list = isinstance(regions, Sequence) and not isinstance(regions, str)
        if not is_list or not regions or not all(isinstance(c, type) and issubclass(c, Module) for c in regions):
            raise ValueError(f"regions={regions!r} is neither 'auto' nor a list of classes of modules, as [Block] is")
    if split != "auto":
        raise ValueError(
            f"split={split!r} cannot be used with regions={regions!r}: what is compiled for a region is shared by all"
            " regions of its class, and never cut; buckets are launched behind the backward of each region. Drop split,"
            " or regions"
        )


# Measured on two CPU ranks (benchmarks/README.md): at 1 Gbit/s 5 MiB saves a tenth of the step that 25 MiB takes, on an
# unshaped link it makes no difference that could be told. On GPUs, where starting a collective costs more beside what
# it takes, it is DistributedDataParallel's value (Li et al. 2020, "PyTorch Distributed", section 5.2).
DEFAULT_CAP_MIB: Mapping[str, float] = {"cpu": 5.0, "cuda": 25.0}


def caps_from_mib(
    bucket_cap_mb: float | Sequence[float] | None, first_bucket_cap_mb: float, device_type: str
) -> tuple[int, ...]:
    """Bucket capacities in bytes from the MiB values of the public interface.

    Args:
        bucket_cap_mb: One capacity in MiB, or a list with one for each bucket (the last one holds for the rest). None
            stands for the value in ``DEFAULT_CAP_MIB``.
        first_bucket_cap_mb: Capacity in MiB of the bucket that is launched first, so that communication starts early. A
            larger value than ``bucket_cap_mb`` is cut down to it; it is not used beside a list.
        device_type: Where the gradients are: "cpu" or "cuda".

    Raises:
        ValueError: A capacity is not a number above zero, or the list is empty.
    """
    first_cap = _cap_bytes("first_bucket_cap_mb", first_bucket_cap_mb)
    if bucket_cap_mb is None:
        bucket_cap_mb = DEFAULT_CAP_MIB.get(device_type, DEFAULT_CAP_MIB["cuda"])
    if isinstance(bucket_cap_mb, list | tuple):
        if not bucket_cap_mb:
            raise ValueError(
                "bucket_cap_mb=[] holds no capacity; pass bucket_cap_mb=25 (MiB) or a list such as [1, 25]"
            )
        return tuple(_cap_bytes(f"bucket_cap_mb[{i}]", cap) for i, cap in enumerate(bucket_cap_mb))
    cap = _cap_bytes("bucket_cap_mb", bucket_cap_mb)
    return (min(first_cap, cap), cap)


def _cap_bytes(setting: str, mib: Any) -> int:
    if isinstance(mib, bool) or not isinstance(mib, int | float) or not 0 < mib < float("inf"):
        default = 1 if setting.startswith("first") else 25
        raise ValueError(f"{setting}={mib!r} must be a positive number of MiB; pass for example {setting}={default}")
    return max(1, int(mib * _MIB))
