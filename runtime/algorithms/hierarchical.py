"""Reduction inside each node first, then between one rank of each node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.nn import Parameter

from ddp_compile.runtime.algorithms.collective_chain import CollectiveChain
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.comm_algorithm import Traits
from ddp_compile.runtime.comm.process_groups import NodeGroups


class Hierarchical(CollectiveChain):
    """Runs another algorithm between the leaders of the nodes, on the sum of each node.

    Buckets arrive divided by the number of all ranks, so the sum of the nodes' sums is the mean, however many ranks a
    node has. All ranks of a node get their leader's result, bit for bit.

    Args:
        between: Runs between the leaders; `attach` gives it their process group.
    """

    def __init__(self, process_group: dist.ProcessGroup, between: CollectiveChain) -> None:
        super().__init__(process_group)
        self.num_collectives = 0  # set by `attach`
        self.name = f"hierarchical {between.name}"
        self.traits = Traits(layout=between.traits.layout, takes_sparse=False, takes_dtypes=between.traits.takes_dtypes)
        self._between = between
        self._nodes: Any = None  # set by `attach`

    def attach(self, parameters: Sequence[Parameter]) -> None:
        """Make the process groups of the nodes and of their leaders.

        Raises:
            ValueError: On every rank, if any rank does not know its position on its node.
        """
        nodes: Any = NodeGroups.of(self.process_group, parameters[0].device, self.name)
        self._nodes = nodes
        self.shares_process_group = False
        self.num_collectives = 0 if nodes.within is None else 2
        if self._sends_between:
            self._between.process_group = nodes.leaders
            self.num_collectives += self._between.num_collectives

    @property
    def _sends_between(self) -> bool:
        return self._nodes.leaders is not None and self._nodes.leaders.size() > 1

    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        flat, nodes = bucket.flat, self._nodes
        if (work := nodes.reduce(flat)) is not None:
            yield work
        if self._sends_between:
            yield from self._between.reduce(bucket)
        if (work := nodes.broadcast(flat)) is not None:
            yield work
