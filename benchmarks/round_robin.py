"""Buckets that take turns over several process groups, as in section 5.4 of Li et al. 2020, "PyTorch Distributed".

    python -m ddp_compile bench --implementations ddp_compile-auto,benchmarks.round_robin:two

Results: docs/decisions/round_robin.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from ddp_compile import ddp_compile
from ddp_compile.algorithms import AlgorithmConfig, Bucket, CommAlgorithm, Pending
from ddp_compile.bench.implementations import Implementation
from ddp_compile.bench.settings import Case


class RoundRobin(CommAlgorithm):
    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self.name = f"gradient all-reduce over {len(groups)} groups in turn"
        self._groups = groups

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        group = self._groups[bucket.spec.index % len(self._groups)]
        return group.allreduce([bucket.flat])


@dataclass(frozen=True)
class RoundRobinConfig(AlgorithmConfig):
    groups: tuple[Any, ...]

    def build(self, process_group: dist.ProcessGroup) -> RoundRobin:
        return RoundRobin(self.groups)


def two(model: nn.Module, case: Case) -> Implementation:
    return _over(2, model, case)


def three(model: nn.Module, case: Case) -> Implementation:
    return _over(3, model, case)


def _over(num_groups: int, model: nn.Module, case: Case) -> Implementation:
    groups = tuple(dist.new_group() for _ in range(num_groups))
    algorithm = RoundRobinConfig(groups)
    replicated: Any = ddp_compile(model, bucket_cap_mb=case.bucket_cap_mb, mode=case.mode, algorithm=algorithm)
    return Implementation(forward=replicated, no_sync=replicated.no_sync)
