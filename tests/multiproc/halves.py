"""An algorithm of one's own: an all-reduce in two halves, as sharded optimizers send it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ddp_compile.algorithms import AlgorithmConfig, CommAlgorithm, Pending


class Halves(CommAlgorithm):
    name = "reduce-scatter and all-gather"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def launch(self, bucket, is_last: bool) -> Pending:
        assert bucket.flat.is_floating_point() and not bucket.spec.is_sparse
        size = self._group.size()
        whole = F.pad(bucket.flat, (0, -bucket.flat.numel() % size))
        shard = whole.new_empty(whole.numel() // size)
        scattered = dist.reduce_scatter_tensor(shard, whole, group=self._group, async_op=True)
        return Gathering(self._group, scattered, shard, whole, bucket.flat)


@dataclass
class Gathering:
    group: dist.ProcessGroup
    scattered: dist.Work
    shard: Tensor
    whole: Tensor
    flat: Tensor

    def wait(self) -> None:
        self.scattered.wait()
        dist.all_gather_into_tensor(self.whole, self.shard, group=self.group)
        self.flat.copy_(self.whole[: self.flat.numel()])

    def result(self) -> list[Tensor]:
        return [self.flat]


@dataclass(frozen=True)
class HalvesConfig(AlgorithmConfig):
    def build(self, process_group: dist.ProcessGroup) -> Halves:
        return Halves(process_group)
