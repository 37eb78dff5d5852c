"""Submodules that ``fully_shard`` has sharded: averages the gradients that FSDP2 does not."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_compile import torch_internals
from ddp_compile.errors import RanksDifferError, ReductionError, ReplicationError, format_ranks, this_rank
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.collectives import broadcast_all, ranks_unlike_rank_0
from ddp_compile.runtime.comm.process_groups import group_of, objects_of_all

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_WAY_OUT = "shard over all dimensions, fully_shard(module, mesh=mesh['replicas', 'parts']), without ddp_compile"


class ShardedSubmodule(NamedTuple):
    """What one call of ``fully_shard`` was given."""

    name: str  #: of the module, or of the first of several
    module: FSDPModule
    parameters: dict[str, nn.Parameter]  #: without those of nested calls; DTensors while they are sharded


def sharded_submodules(module: nn.Module) -> list[ShardedSubmodule]:
    """The sharded submodules of a module, outermost first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and without it there are none
    if fsdp is None:
        return []
    found: dict[int, ShardedSubmodule] = {}
    every_name = list(module.named_parameters(remove_duplicate=False))
    for name, submodule in module.named_modules():
        if not isinstance(submodule, fsdp.FSDPModule):
            continue
        state = id(torch_internals.state_of_fully_shard(submodule))
        own = {id(parameter) for parameter in torch_internals.parameters_of_fully_shard(submodule)}
        named = {parameter_name: p for parameter_name, p in every_name if id(p) in own}
        if named and state not in found:
            found[state] = ShardedSubmodule(name, submodule, named)
    return list(found.values())


def names_sharded(module: nn.Module) -> frozenset[str]:
    """The names of parameters that FSDP2 reduces, at least over some of the ranks."""
    return frozenset(name for submodule in sharded_submodules(module) for name in submodule.parameters)


class ShardedSubmodules:
    """Averages gradients over replicas after FSDP2 has averaged and scattered them over its own ranks.

    If FSDP2 shards over all ranks to average over, nothing is left to do. If it shards over some of them, several
    ranks, the replicas, hold each part. FSDP2 writes ``.grad`` without AccumulateGrad, so the reducer does not see
    these parameters. But in the backward it calls a hook with the reduced gradients of each submodule in turn, in an
    order that the graph determines. The all-reduces of the hooks use their own process groups, since their order
    relative to the launches of buckets is not certain.

    Note [Order of sharded submodules]
    If another replica left out a submodule, each later all-reduce would add up gradients of two submodules. So the
    ranks compare each hook of their first backward, and keep that order. A hook in another position is an error before
    anything is sent.

    Args:
        submodules: From `sharded_submodules`.
    """

    def __init__(
        self, submodules: Sequence[ShardedSubmodule], process_group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.names = [submodule.name for submodule in submodules]
        self._submodules = submodules
        self._process_group = process_group
        self._device = device
        self._rank = dist.get_rank()
        self._replicas: dict[str, dist.ProcessGroup] = {}  # by submodule, from `attach` on
        self._order: list[str] | None = None
        self._called: list[str] = []

    def describe(self) -> list[str]:
        """Lines that must be the same on every rank."""
        lines = []
        for submodule in self._submodules:
            size = len(torch_internals.ranks_of_fully_shard(submodule.module))
            lines.append(f"submodule {submodule.name}: fully_shard over {size} ranks")
            for name, parameter in submodule.parameters.items():
                lines.append(f"parameter {name}: {parameter.dtype} {list(parameter.shape)} in parts")
        return lines

    def attach(self, broadcast: bool) -> None:
        """Make the process groups, broadcast parameters between replicas, and set FSDP2's hook, on all ranks together.

        Args:
            broadcast: Whether replicas take the parameters of the first replica.

        Raises:
            ReplicationError: FSDP2's ranks do not divide the ranks to average over, or FSDP2 already has a hook.
        """
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for submodule in self._submodules:
            self._refuse_hook(submodule)
            ranks = torch_internals.ranks_of_fully_shard(submodule.module)
            everyone = objects_of_all(ranks, self._process_group, self._device)
            replicas = self._replicas_of(submodule.name, everyone)
            if len(replicas) == 1:
                continue
            if replicas not in groups:
                groups[replicas] = group_of(replicas, self._process_group, self._device)
            self._replicas[submodule.name] = groups[replicas]
            if broadcast:
                broadcast_all(list(submodule.parameters.values()), groups[replicas])
            submodule.module.set_all_reduce_hook(functools.partial(self._average, submodule.name))

    def detach(self) -> None:
        """Make FSDP2 reduce over its own ranks alone again."""
        for submodule in self._submodules:
            if submodule.name in self._replicas:
                torch_internals.remove_all_reduce_hook(submodule.module)

    def _refuse_hook(self, submodule: ShardedSubmodule) -> None:
        if torch_internals.all_reduce_hook_of_fully_shard(submodule.module) is not None:
            raise ReplicationError(
                f"{this_rank()}: submodule {submodule.name} already has an all-reduce hook (set_all_reduce_hook), which"
                f" ddp_compile would replace; leave it out, or {_WAY_OUT}"
            )

    def _replicas_of(self, name: str, ranks_of_each: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The global ranks that hold the same part of a submodule as this rank.

        Args:
            ranks_of_each: The ranks over which FSDP2 shards it, by rank in the process group.
        """
        averaged = dist.get_process_group_ranks(self._process_group)
        parts = sorted({tuple(ranks) for ranks in ranks_of_each})
        if sorted(rank for part in parts for rank in part) != sorted(averaged) or len(set(map(len, parts))) > 1:
            raise ReplicationError(
                f"{this_rank()}: submodule {name} is sharded by fully_shard over ranks"
                f" {' and '.join(format_ranks(part) for part in parts)}, but ddp_compile averages over ranks"
                f" {format_ranks(averaged)}. It must average over all ranks of FSDP2, in parts of one size: pass no"
                f" device_mesh and no process_group, or one of all of them; or {_WAY_OUT}"
            )
        place = next(part.index(self._rank) for part in parts if self._rank in part)
        return tuple(part[place] for part in parts)

    def _average(self, name: str, reduced: Tensor) -> None:
        """FSDP2's hook: called with a submodule's gradients, shape (n,), which FSDP2 scales and unpacks afterward."""
        if not self._called:
            torch_internals.queue_backward_callback(self._nearly_ended)
        self._called.append(name)
        group = self._replicas[name]
        if self._order is None:
            self._compare(group)
        elif self._order[: len(self._called)] != self._called:
            raise self._order_changed()
        reduced.mul_(1 / group.size())
        try:
            dist.all_reduce(reduced, group=group)
        except RuntimeError as error:
            raise error_messages.exchange_failed(f"all-reduce of submodule {name} over its replicas", error) from error

    def _nearly_ended(self) -> None:
        # Callbacks of FSDP2 may call the last hooks; all of them have been queued by now.
        torch_internals.queue_backward_callback(self._ended)

    def _ended(self) -> None:
        if self._order is None:
            self._compare(next(iter(self._replicas.values())))
            self._order = self._called
        elif self._called != self._order:
            raise self._order_changed()
        self._called = []

    def _compare(self, group: dist.ProcessGroup) -> None:
        try:
            different = ranks_unlike_rank_0("\n".join(self._called).encode(), group, self._device)
        except RuntimeError as error:
            raise error_messages.exchange_failed("comparison of the order of sharded submodules", error) from error
        if different:
            ranks = format_ranks(different)
            first = dist.get_global_rank(group, 0)
            raise RanksDifferError(
                f"{this_rank()}: in the first backward, the submodules of fully_shard are reduced in another order on"
                f" rank {ranks} than on rank {first}; here it is {', '.join(self._called)}. Every replica must use the"
                f" same submodules in the same order; or {_WAY_OUT}"
            )

    def _order_changed(self) -> ReductionError:
        return ReductionError(
            f"{this_rank()}: the submodules of fully_shard were reduced in the order {', '.join(self._called)} since"
            f" the last backward that ended without an error, but {', '.join(self._order or ())} in the first one."
            " Another replica may have used another order, so nothing more is averaged: start again from a checkpoint,"
            f" and use the same submodules in every backward; or {_WAY_OUT}"
        )
