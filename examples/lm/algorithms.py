"""The algorithms that ``--algorithm`` offers, each with settings for a run of a few hundred steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ddp_compile.algorithms import (
    AlgorithmConfig,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
)
from ddp_compile.optim import QAdam

_ALGORITHMS: Mapping[str, Callable[[], AlgorithmConfig]] = {
    "all-reduce": GradientAllReduce,
    "bfloat16": lambda: GradientAllReduce(wire_dtype=torch.bfloat16),
    "byte-grad": ByteGrad,
    "decentralized": Decentralized,
    "shift-one": lambda: Decentralized(peer_selection="shift_one"),
    "low-precision": LowPrecisionDecentralized,
    "local-sgd": lambda: LocalSGD(period=4, warmup_steps=10),
    # A cycle of few steps needs other outer settings than the defaults, which are for hundreds of steps.
    "diloco": lambda: DiLoCo(sync_every=10, outer_lr=1.0, outer_momentum=0.5, warmup_steps=60),
    "async": lambda: AsyncModelAverage(sync_interval_ms=100, warmup_steps=10),
}
NAMES = (*_ALGORITHMS, "qadam")


def algorithm_named(name: str, optimizer: torch.optim.Optimizer) -> AlgorithmConfig:
    """One of ``NAMES``. A `QAdam` brings its own."""
    return optimizer.algorithm() if isinstance(optimizer, QAdam) else _ALGORITHMS[name]()


def q_adam_like(optimizer: torch.optim.Optimizer, warmup_steps: int) -> QAdam:
    """A `QAdam` with the parameters and settings of an AdamW."""
    names = ("lr", "betas", "eps", "weight_decay")
    groups = [{name: group[name] for name in ("params", *names)} for group in optimizer.param_groups]
    return QAdam(groups, decoupled_weight_decay=True, warmup_steps=warmup_steps)
