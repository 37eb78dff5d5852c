"""Process groups of our own, beside the one that a module was given, and the nodes of its ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.errors import this_rank
from ddp_compile.runtime.comm.collectives import name_from_rank_0
from ddp_compile.runtime.comm.rank_names import format_ranks


def group_of(
    ranks: Sequence[int],
    like: dist.ProcessGroup,
    device: torch.device,
    name: str | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """A process group of some ranks of another one.

    Args:
        ranks: Their global ranks.
        like: Has the same timeout.
        device: Where what ``like`` sends is.
        name: What the ranks have agreed on. When None, they draw one, for which all ranks of ``like`` have to be here.
        backend: That of ``like`` when None; "gloo" for what hosts tell each other.
    """
    timeout = torch_internals.group_timeout(like, device)
    name = name_from_rank_0(like, device) if name is None else name
    with torch_internals.groups_of_some_ranks(f"ddp_compile_{name}_{ranks[0]}"):
        group = dist.new_group(list(ranks), timeout, backend or dist.get_backend(like), use_local_synchronization=True)
    assert group is not None
    return group


def ranks_of_nodes(process_group: dist.ProcessGroup, name: str) -> list[list[int]]:
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
            f"{this_rank()}: the {name} has to know which ranks are on one node, and LOCAL_RANK is no number"
            f" on rank{'s' if len(unknown) > 1 else ''} {format_ranks(sorted(unknown))}. Start with torchrun, set it on"
            " every rank to its place on its node, or pass hierarchical=False"
        )
    nodes: dict[int, list[int]] = {}
    for rank, first_of_node in sorted(everyone):
        nodes.setdefault(first_of_node, []).append(rank)
    return list(nodes.values())


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """What ranks need that add up on their nodes first, and then talk from node to node.

    Args:
        sizes: How many ranks each node has.
        node: This rank's, by its number in ``sizes``.
        leader: The global rank that speaks for it.
        within: The ranks of the node; None if this one is alone there.
        leaders: One rank of each node, on those; None on the others.
    """

    sizes: tuple[int, ...]
    node: int
    leader: int
    within: dist.ProcessGroup | None
    leaders: dist.ProcessGroup | None

    @classmethod
    def of(cls, process_group: dist.ProcessGroup, device: torch.device, name: str) -> NodeGroups:
        """The nodes of a process group, as the launcher has numbered them; on all of its ranks at once.

        Args:
            process_group: The ranks.
            device: Where what is sent will be.
            name: Who asks, for the error.

        Raises:
            ValueError: On every rank, if any of them does not know its place on its node.
        """
        nodes = ranks_of_nodes(process_group, name)
        drawn = name_from_rank_0(process_group, device)
        node = next(number for number, ranks in enumerate(nodes) if dist.get_rank() in ranks)
        own, leaders = nodes[node], [ranks[0] for ranks in nodes]
        return cls(
            sizes=tuple(map(len, nodes)),
            node=node,
            leader=own[0],
            within=group_of(own, process_group, device, f"{drawn}_node") if len(own) > 1 else None,
            leaders=group_of(leaders, process_group, device, f"{drawn}_leaders") if own[0] == dist.get_rank() else None,
        )

    @classmethod
    def of_single_ranks(cls, process_group: dist.ProcessGroup, device: torch.device) -> NodeGroups:
        """Every rank by itself, in a group beside the process group; on all of its ranks at once."""
        group = group_of(dist.get_process_group_ranks(process_group), process_group, device)
        return cls((1,) * group.size(), group.rank(), dist.get_rank(), None, group)

    def reduce(self, flat: Tensor) -> dist.Work | None:
        """Start to add up what the node has, on its leader."""
        if self.within is None:
            return None
        return dist.reduce(flat, self.leader, group=self.within, async_op=True)

    def broadcast(self, flat: Tensor) -> dist.Work | None:
        """Start to give the node what its leader has."""
        if self.within is None:
            return None
        return dist.broadcast(flat, self.leader, group=self.within, async_op=True)
