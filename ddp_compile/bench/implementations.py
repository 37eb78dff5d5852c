"""The ways to train that are measured.

Each entry turns a plain model into a callable one. Each case has its own processes (see `rank_process`), so an entry
may change global settings of torch.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.algorithms import (
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
)
from ddp_compile.bench import torch_switches
from ddp_compile.bench.functional_replicate import FunctionalReplicate
from ddp_compile.bench.loss_scale import BlockingCount, CountedByModel, LossScale, OwnCount
from ddp_compile.bench.settings import Case
from ddp_compile.config import SplitMode
from ddp_compile.optim import QAdam
from ddp_compile.validation.named_functions import load_function


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A model that is ready to train.

    Args:
        forward: Called with a batch's inputs.
        no_sync: Context in which gradients accumulate locally.
        prepare_optimizers: Called with the optimizers of the model's parameters; returns the optimizers to step.
        clip: Called with the model, the largest norm and the optimizers, which step next; nobody reads what it returns.
        token_scale: Makes what turns losses that are summed over tokens into a mean.
    """

    forward: Callable[[Any], Any]
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    prepare_optimizers: Callable[[list[Optimizer]], list[Optimizer]] = lambda optimizers: optimizers
    clip: Callable[[Any, float, list[Optimizer]], object] = lambda m, max_norm, _: clip_grad_norm_(
        m.parameters(), max_norm
    )
    token_scale: Callable[[], LossScale] = BlockingCount


def _local(model: nn.Module, case: Case) -> Implementation:
    return Implementation(forward=torch.compile(model, mode=case.mode), token_scale=OwnCount)


def _data_parallel(model: nn.Module, case: Case) -> DistributedDataParallel:
    """DistributedDataParallel with the settings that make it fastest.

    A capacity given by ``bucket_cap_mb`` holds for the first bucket too. Only the default has a first bucket of 1 MiB,
    without which the reducer's buckets would differ from the splitter's and be launched later.
    """
    settings: dict[str, Any] = {"gradient_as_bucket_view": True}
    parameters = inspect.signature(DistributedDataParallel).parameters
    if "bucket_cap_mb_list" in parameters:
        settings["bucket_cap_mb_list"] = [min(1.0, case.bucket_cap_mb), case.bucket_cap_mb]
    elif case.bucket_cap_mb != 25.0:
        settings["bucket_cap_mb"] = case.bucket_cap_mb
    if "batched_grad_copy" in parameters:
        settings["batched_grad_copy"] = True
    return DistributedDataParallel(model, **settings)


def _ddp_eager(model: nn.Module, case: Case) -> Implementation:
    replicated = _data_parallel(model, case)
    return Implementation(forward=replicated, no_sync=replicated.no_sync)


def _compile_ddp(model: nn.Module, case: Case) -> Implementation:
    replicated = _data_parallel(model, case)
    return Implementation(forward=torch.compile(replicated, mode=case.mode), no_sync=replicated.no_sync)


def _functional(model: nn.Module, case: Case) -> Implementation:
    assert dist.group.WORLD is not None
    replicated = FunctionalReplicate(model, dist.group.WORLD)
    device = next(model.parameters()).device.type
    options = torch_switches.overlapped_all_reduces(case.bucket_cap_mb, case.mode, device)
    # Averages are part of the graph's backward, so every micro-batch is reduced.
    return Implementation(forward=torch.compile(replicated, fullgraph=True, options=options))


def _ddp_compile(model: nn.Module, case: Case, **settings: Any) -> Implementation:
    replicated: Any = ddp_compile(model, bucket_cap_mb=case.bucket_cap_mb, mode=case.mode, **settings)
    return Implementation(
        forward=replicated,
        no_sync=replicated.no_sync,
        clip=_clip,
        token_scale=partial(CountedByModel, replicated.normalize_by),
    )


def _clip(model: Any, max_norm: float, optimizers: list[Optimizer]) -> None:
    """A single fused optimizer multiplies the gradients in its step."""
    is_fused = len(optimizers) == 1 and optimizers[0].defaults.get("fused")
    model.clip_grad_norm_(max_norm, optimizer=optimizers[0] if is_fused else None)


def _qadam(model: nn.Module, case: Case) -> Implementation:
    """QAdam, whose warm-up ends before timing begins. Ignores ``--optimizer``."""
    optimizer = QAdam(model.parameters(), lr=1e-4, warmup_steps=2)
    ours = _ddp_compile(model, case, algorithm=optimizer.algorithm())
    return replace(ours, prepare_optimizers=lambda _: [optimizer])


def _sharded(model: nn.Module, case: Case) -> Implementation:
    ours = _ddp_compile(model, case)
    prepare_optimizers = partial(shard_optimizer, model=model)
    return replace(ours, prepare_optimizers=prepare_optimizers, clip=lambda m, max_norm, _: m.clip_grad_norm_(max_norm))


#: Computation without any communication: one of the bounds.
LOCAL = "local"
#: Communication without any computation: the other bound. It does not train, so it has no entry below.
COMMUNICATION = "communication"

PEERS: dict[str, Callable[[nn.Module, Case], Implementation]] = {
    "ddp-eager": _ddp_eager,
    "compile-ddp": _compile_ddp,
    "functional": _functional,
}

OURS_PREFIX = "ddp_compile-"
OURS: dict[str, Callable[[nn.Module, Case], Implementation]] = {
    f"{OURS_PREFIX}{split}": partial(_ddp_compile, split=split) for split in get_args(SplitMode)
} | {f"{OURS_PREFIX}sharded": _sharded}

IMPLEMENTATIONS = {LOCAL: _local, **PEERS, **OURS}
#: Ours with algorithms that the peers lack. Their results differ from the peers', so "all" does not include them.
ALGORITHMS: dict[str, Callable[[nn.Module, Case], Implementation]] = {
    f"{OURS_PREFIX}{name}": partial(_ddp_compile, algorithm=algorithm)
    for name, algorithm in {
        "bfloat16": GradientAllReduce(wire_dtype=torch.bfloat16),
        "float16": GradientAllReduce(wire_dtype=torch.float16),
        "bfloat16-sums": GradientAllReduce(wire_dtype=torch.bfloat16, sum_dtype=torch.float32),
        "reproducible": GradientAllReduce(reproducible=True),
        "byte-grad": ByteGrad(),
        "decentralized": Decentralized(),
        "shift-one": Decentralized(peer_selection="shift_one"),
        "low-precision": LowPrecisionDecentralized(),
        "local-sgd": LocalSGD(period=4),
        "diloco": DiLoCo(sync_every=100, fragments=4, fragment_sync_delay=10, fragment_update_alpha=0.5),
        "async": AsyncModelAverage(),
    }.items()
} | {f"{OURS_PREFIX}qadam": _qadam}

#: Implementations without a mode, since they do not compile.
EAGER = {"ddp-eager", COMMUNICATION}
#: Implementations without buckets.
WITHOUT_BUCKETS = {LOCAL}


def implementation_named(name: str) -> Callable[[nn.Module, Case], Implementation]:
    """The entry of this name, or a user's ``module:function`` of the same signature.

    Raises a ValueError if it is not known.
    """
    known = {**IMPLEMENTATIONS, **ALGORITHMS}
    return known[name] if name in known else load_function("implementation", name, known)
