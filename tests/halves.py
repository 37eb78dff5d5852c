"""Custom algorithms: an all-reduce in two halves, as sharded optimizers send it, and a config for any other."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ddp_compile.algorithms import AlgorithmConfig, Bucket, CommAlgorithm, Pending, Traits


class Halves(CommAlgorithm):
    name = "reduce-scatter and all-gather"
    traits = Traits(takes_sparse=False)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._scattered: Halved | None = None  # whose all-gather has not been started

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        self.drain()  # so that collectives come in the same order on every rank, whenever it waits
        size = self._group.size()
        whole = F.pad(bucket.flat, (0, -bucket.flat.numel() % size))
        shard = whole.new_empty(whole.numel() // size)
        work = dist.reduce_scatter_tensor(shard, whole, group=self._group, async_op=True)
        self._scattered = Halved(work, shard, whole, bucket.flat)
        return self._scattered

    def drain(self) -> None:
        if self._scattered is not None:
            halved, self._scattered = self._scattered, None
            halved.work.wait()
            halved.work = dist.all_gather_into_tensor(halved.whole, halved.shard, group=self._group, async_op=True)


@dataclass
class Halved:
    work: Any
    shard: Tensor
    whole: Tensor
    flat: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.flat.copy_(self.whole[: self.flat.numel()])

    def result(self) -> list[Tensor]:
        return [self.flat]


@dataclass(frozen=True)
class HalvesConfig(AlgorithmConfig):
    def build(self, process_group: dist.ProcessGroup) -> Halves:
        return Halves(process_group)


@dataclass(frozen=True)
class Built(AlgorithmConfig):
    """A config of the algorithm that ``make(process_group)`` returns."""

    make: Callable[[dist.ProcessGroup], Any] = field(repr=False)

    def build(self, process_group: dist.ProcessGroup) -> Any:
        return self.make(process_group)
