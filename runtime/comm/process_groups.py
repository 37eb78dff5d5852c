"""The process groups that the package makes in addition to a module's own, and the nodes of its ranks."""

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.errors import on_ranks, this_rank
from ddp_compile.runtime.comm import streams
from ddp_compile.runtime.comm.collectives import name_from_rank_0

_OWN: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Any, torch.device]] = weakref.WeakKeyDictionary()


def group_of(
    ranks: Sequence[int], like: dist.ProcessGroup, device: torch.device, name: str | None = None
) -> dist.ProcessGroup:
    """A process group of some ranks of another group, with that group's backend and timeout.

    It exists until ``torch.distributed.destroy_process_group()``. The ranks have agreed on ``name``. If it is None,
    they draw one, and all ranks of ``like`` must call this.
    """
    timeout = torch_internals.group_timeout(like, device)
    name = name_from_rank_0(like, device) if name is None else name
    with torch_internals.groups_of_some_ranks(f"ddp_compile_{name}_{ranks[0]}"):
        group = dist.new_group(list(ranks), timeout, dist.get_backend(like), use_local_synchronization=True)
    assert group is not None
    return group


def close_groups(groups: Sequence[dist.ProcessGroup], like: dist.ProcessGroup, device: torch.device) -> None:
    """Destroy process groups of the ranks of another group; all of them call this, with nothing under way.

    A group that stays keeps its threads, connections and communicators until all groups are destroyed. They stay if the
    other group has been destroyed already, since then the ranks cannot wait for each other.
    """
    if not torch_internals.is_registered(like):
        return
    with streams.current_device(device):
        dist.barrier(group=like)  # a rank that still receives from this one would fail
    for group in groups:
        dist.destroy_process_group(group)


def own_group(process_group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A process group of the same ranks over which nothing else is sent; all of them call this. See `group_of`."""
    return group_of(dist.get_process_group_ranks(process_group), process_group, device)


def host_group(process_group: dist.ProcessGroup, device: torch.device, own: bool) -> tuple[Any, torch.device]:
    """A process group of the same ranks for messages between hosts, and the device of these messages.

    It is the process group itself if its tensors are on a device without streams. Otherwise it is a gloo group, made
    without ``torch.distributed.new_group``, which would keep it until all groups are destroyed. With ``own``, it is one
    for all models of the process group, also of gloo's: ranks out of step must pair no message with a bucket.
    """
    if own and process_group in _OWN:
        return _OWN[process_group]
    is_other = streams.has_streams(device) or (own and torch_internals.backend_name(process_group, device) == "gloo")
    store: Any = process_group.get_group_store() if is_other else None
    if store is None:  # the process group is written in Python, so gloo could not find the peers; or no group is needed
        return process_group, device
    torch_distributed: Any = dist  # it exports these, but not in ``__all__``
    own_store = torch_distributed.PrefixStore(f"ddp_compile/{name_from_rank_0(process_group, device)}/hosts", store)
    timeout = torch_internals.group_timeout(process_group, device)
    group = torch_distributed.ProcessGroupGloo(own_store, process_group.rank(), process_group.size(), timeout)
    return _OWN.setdefault(process_group, (group, torch.device("cpu"))) if own else (group, torch.device("cpu"))


def objects_of_all(own: Any, process_group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """The objects of all ranks, in their order. Every rank calls this, with the device of its parameters."""
    everyone: list[Any] = [own] * process_group.size()
    if len(everyone) > 1:
        with streams.current_device(device):
            dist.all_gather_object(everyone, own, group=process_group)
    return everyone


def ranks_of_nodes(process_group: dist.ProcessGroup, device: torch.device, name: str) -> list[list[int]]:
    """The global ranks that are in the process group, ascending, grouped by node.

    A launcher numbers the ranks of a node without gaps, and sets LOCAL_RANK to the position on the node.
    """
    local_rank = os.environ.get("LOCAL_RANK", "")
    own = (dist.get_rank(), dist.get_rank() - int(local_rank) if local_rank.isdecimal() else None)
    everyone = objects_of_all(own, process_group, device)
    unknown = [rank for rank, first_of_node in everyone if first_of_node is None]
    if unknown:
        raise ValueError(
            f"{this_rank()}: the {name} has to know which ranks share a node, but LOCAL_RANK is not a number"
            f" {on_ranks(unknown)}. Start with torchrun, set LOCAL_RANK on every rank to its position on its node, or"
            " pass hierarchical=False"
        )
    nodes: dict[int, list[int]] = {}
    for rank, first_of_node in sorted(everyone):
        nodes.setdefault(first_of_node, []).append(rank)
    return list(nodes.values())


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """The process groups of ranks that reduce on their nodes first, and then between the nodes."""

    sizes: tuple[int, ...]  #: how many ranks each node has
    node: int  #: this rank's, by its number in ``sizes``
    leader: int  #: the global rank that speaks for it
    within: dist.ProcessGroup | None  #: the ranks of the node; None if this one is alone there
    leaders: dist.ProcessGroup | None  #: of all nodes; None on a rank that is none

    @classmethod
    def of(cls, process_group: dist.ProcessGroup, device: torch.device, name: str, hierarchical: bool = True) -> Self:
        """The nodes of a process group, as the launcher numbered them. Every rank of it calls this.

        Args:
            hierarchical: If False, every rank counts as a node.

        Raises:
            ValueError: On every rank, if any rank does not know its position on its node.
        """
        if not hierarchical:
            group = own_group(process_group, device)
            return cls((1,) * group.size(), group.rank(), dist.get_rank(), None, group)
        nodes = ranks_of_nodes(process_group, device, name)
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

    def reduce(self, flat: Tensor) -> dist.Work | None:
        """Start adding up the node's buffers on its leader."""
        if self.within is None:
            return None
        return dist.reduce(flat, self.leader, group=self.within, async_op=True)

    def broadcast(self, flat: Tensor) -> dist.Work | None:
        """Start broadcasting the leader's buffer to its node."""
        if self.within is None:
            return None
        return dist.broadcast(flat, self.leader, group=self.within, async_op=True)
