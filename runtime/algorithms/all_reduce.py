"""Synchronous data parallelism: the mean of every gradient over all ranks, by one all-reduce for each bucket."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from ddp_compile.runtime.algorithms.base import AlgorithmConfig, CommAlgorithm, Pending
from ddp_compile.runtime.bucket import Bucket


class AllReduce(CommAlgorithm):
    """The sum over the ranks of what each has divided already.

    Args:
        process_group: The ranks to average over.
    """

    name = "gradient all-reduce"
    gives_way_to_comm_hook = True

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        # What dist.all_reduce calls; with many small gradients its checks are seen in the time of a step.
        return self._process_group.allreduce([bucket.flat])


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientAllReduce(AlgorithmConfig):
    """The default: every ``.grad`` is the mean over all ranks, and a comm hook can be registered in its place."""

    def build(self, process_group: dist.ProcessGroup) -> AllReduce:
        """See `AlgorithmConfig.build`."""
        return AllReduce(process_group)
