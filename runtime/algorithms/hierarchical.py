"""Reduce inside each node first, and between the nodes by one rank of each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.runtime.algorithms.base import Traits
from ddp_compile.runtime.algorithms.collective_chain import CollectiveChain
from ddp_compile.runtime.bucket import Bucket
from ddp_compile.runtime.process_groups import group_of
from ddp_compile.runtime.rank_names import format_ranks


class Hierarchical(CollectiveChain):
    """Another algorithm between the leaders of the nodes, each of which has the sum of its node.

    What arrives has been divided by the number of all ranks, so the sum of the sums of nodes is the mean however many
    ranks a node has. The leader's result is what all ranks of its node get, bit for bit.

    Args:
        process_group: The ranks to average over.
        between: What the leaders do; it is given their process group when that is there.
    """

    def __init__(self, process_group: dist.ProcessGroup, between: CollectiveChain) -> None:
        super().__init__(process_group)
        self.num_collectives = 0  # what it is is known from `attach` on
        self.name = f"hierarchical {between.name}"
        self.traits = Traits(layout=between.traits.layout, takes_sparse=False, takes_dtypes=between.traits.takes_dtypes)
        self._between = between
        self._within: Any = None  # from `attach` on
        self._leader = -1
        self._sends_between = False

    def attach(self, parameters: Sequence[Parameter]) -> None:
        """Make the process groups of the nodes and of their leaders.

        Raises:
            ValueError: On every rank, if any of them does not know its place on its node.
        """
        nodes = _ranks_of_nodes(self.process_group, self.name)
        own = next(ranks for ranks in nodes if dist.get_rank() in ranks)
        self._leader = own[0]
        self._sends_between = dist.get_rank() == self._leader and len(nodes) > 1
        device = parameters[0].device
        self._within = group_of(own, self.process_group, device)
        self.num_collectives = 2 if len(own) > 1 else 0
        if self._sends_between:
            leaders = [ranks[0] for ranks in nodes]
            self._between.process_group = group_of(leaders, self.process_group, device)
            self.num_collectives += self._between.num_collectives

    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        """See `CollectiveChain.reduce`."""
        flat, within = bucket.flat, self._within
        if within.size() > 1:
            yield torch_internals.started(dist.reduce(flat, self._leader, group=within, async_op=True))
        if self._sends_between:
            yield from self._between.reduce(bucket)
        if within.size() > 1:
            yield torch_internals.started(dist.broadcast(flat, self._leader, group=within, async_op=True))


def _ranks_of_nodes(process_group: dist.ProcessGroup, name: str) -> list[list[int]]:
    """The global ranks of each node that are in the process group, ascending.

    A launcher numbers the ranks of a node without a gap, and each of them knows its place in LOCAL_RANK.
    """
    local_rank = os.environ.get("LOCAL_RANK", "")
    own = (dist.get_rank(), dist.get_rank() - int(local_rank) if local_rank.isdecimal() else None)
    everyone: list[Any] = [None] * process_group.size()
    dist.all_gather_object(everyone, own, group=process_group)
    unknown = [rank for rank, first_of_node in everyone if first_of_node is None]
    if unknown:
        raise ValueError(
            f"rank {dist.get_rank()}: the {name} has to know which ranks are on one node, and LOCAL_RANK is no number"
            f" on rank{'s' if len(unknown) > 1 else ''} {format_ranks(sorted(unknown))}. Start with torchrun, set it on"
            " every rank to its place on its node, or pass hierarchical=False"
        )
    nodes: dict[int, list[int]] = {}
    for rank, first_of_node in sorted(everyone):
        nodes.setdefault(first_of_node, []).append(rank)
    return list(nodes.values())
