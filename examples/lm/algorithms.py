"""The ways to communicate that ``--algorithm`` offers, each with settings that suit a run of some hundred steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ddp_compile.algorithms import (
    AlgorithmConfig,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
)

ALGORITHMS: Mapping[str, Callable[[], AlgorithmConfig]] = {
    "all-reduce": GradientAllReduce,
    "bfloat16": lambda: GradientAllReduce(wire_dtype=torch.bfloat16),
    "byte-grad": ByteGrad,
    "decentralized": Decentralized,
    "shift-one": lambda: Decentralized(peer_selection="shift_one"),
    "low-precision": LowPrecisionDecentralized,
    "local-sgd": lambda: LocalSGD(period=4, warmup_steps=10),
    "async": lambda: AsyncModelAverage(sync_interval_ms=100, warmup_steps=10),
}
