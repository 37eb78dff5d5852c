"""How flat buffers are cut into one shard for each rank, and how shards travel.

Note [Point to point on gloo]
gloo's reduce-scatter moves as much as its all-reduce, and its all-gather takes three times as long as messages from
rank to rank (23 MiB, two ranks, torch 2.13: 56 ms and 18 ms). So on gloo each rank sends every other one its part, and
adds up what it gets in the order of the ranks; with two ranks that is bit for bit what an all-reduce gives. The other
backends have ``reduce_scatter_tensor`` and ``all_gather_into_tensor``.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.errors import RanksDifferError, this_rank
from ddp_compile.plan.spec import PADDED_ALIGNMENT_BYTES
from ddp_compile.runtime.comm import streams
from ddp_compile.runtime.comm.transfers import Transfer, keep_after


class ReduceScatter:
    """A bucket on its way to shards; what the reducer waits for.

    Args:
        transfer: What is under way.
        parts: What the ranks contribute to this rank's shard, in their order. One alone is the sum already.
        flat: The flat buffer, of whose other shards nobody can say what they hold.
    """

    def __init__(self, transfer: Transfer, parts: Sequence[Tensor], flat: Tensor) -> None:
        self._transfer = transfer
        self._parts = list(parts)
        self._flat = flat
        self._shard: Tensor | None = None

    def wait(self) -> None:
        """See `ddp_compile.runtime.buckets.comm_algorithm.Pending`."""
        if self._shard is not None:
            return
        self._transfer.wait()
        streams.used_here(self._parts)  # allocated where the bucket was launched
        first, *others = self._parts
        if others:
            first = first.add(others[0])  # not in place: it may lie in the flat buffer, which can be sent again
            for part in others[1:]:
                first.add_(part)
        self._parts = []
        self._shard = first

    @property
    def shard(self) -> Tensor:
        """The sum over the ranks of this rank's shard, shape (n,), on memory of its own; to be asked after `wait`."""
        assert self._shard is not None
        return self._shard

    def result(self) -> list[Tensor]:
        """See `ddp_compile.runtime.buckets.comm_algorithm.Pending`."""
        return [self._flat]


class ShardTransfers:
    """Sends shards between the ranks of process groups that nobody else uses.

    What is sent in backwards has a group of its own, so that where one rank has left out a step, no gather finds a
    reduction of another one in its place: both wait, until the timeout says so.

    Args:
        process_group: The ranks; for gathers.
        for_gradients: The same ranks.
        device: Where the buffers lie.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, for_gradients: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._group = process_group
        self._for_gradients = for_gradients
        self.rank = process_group.rank()
        self.world_size = process_group.size()
        # gloo reads messages at the tensor's data pointer, which has to point to host memory.
        is_gloo = torch_internals.backend_name(process_group, device) == "gloo"
        self._from_rank_to_rank = is_gloo and not streams.has_streams(device)
        self._gathers: list[Transfer] = []  # that nobody may have waited for
        if streams.work_blocks_host(process_group, device):
            keep_after(self, partial(_wait_for_others, self._gathers))

    def shard_numel(self, numel: int, element_size: int) -> int:
        """Elements of each shard of a flat buffer; the last shards may be shorter, or empty.

        With CPU tensors on gloo, shards begin at multiples of `PADDED_ALIGNMENT_BYTES`, as gradients do. So an operator
        takes the same elements in vectors, whether it gets a piece or the whole parameter. It takes the rest at the end
        one by one, and may round those elements differently (docs/torch_facts.md).
        """
        unit = PADDED_ALIGNMENT_BYTES // element_size if self._from_rank_to_rank else 1
        return -(-numel // (self.world_size * unit)) * unit

    def reduce_scatter(self, flat: Tensor) -> ReduceScatter:
        """Start to add up a flat buffer over the ranks, each of which gets the sum of its own shard.

        Args:
            flat: Shape (n,); not to be written before the result is there.
        """
        shards = self._shards(flat)
        own = shards[self.rank]
        if self.world_size == 1:
            return ReduceScatter(Transfer(), [own.clone()], flat)
        if not self._from_rank_to_rank:
            return self._reduce_scatter_tensor(flat)
        received = own.new_empty((self.world_size - 1, own.numel()))
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        into = dict(zip(others, received, strict=True))
        works = _exchange(self._for_gradients, {rank: shards[rank] for rank in others}, into, 0)
        parts = [own if rank == self.rank else into[rank] for rank in range(self.world_size)]
        return ReduceScatter(Transfer(works), parts, flat)

    def all_gather(self, flat: Tensor, tag: int = 0) -> Transfer:
        """Start to give every rank the shards of all others.

        Args:
            flat: Shape (n,), a multiple of the world size, with this rank's shard in its place.
            tag: Where messages go from rank to rank, those of different tags do not find each other.
        """
        shards = flat.chunk(self.world_size)
        own = shards[self.rank]
        if self.world_size == 1:
            return Transfer()
        if self._from_rank_to_rank:
            others = [rank for rank in range(self.world_size) if rank != self.rank]
            into = {rank: shards[rank] for rank in others}
            works = _exchange(self._group, dict.fromkeys(others, own), into, tag)
        else:
            works = [torch_internals.all_gather_single(flat, own, self._group)]
        gather = Transfer(works)
        self._gathers[:] = [each for each in self._gathers if not each.is_done] + [gather]
        return gather

    def agree_on(self, what: str) -> None:
        """See that all ranks are about to do the same: gloo ends a process whose message has another size.

        With gloo alone: with NCCL the host would wait for the GPU to have the answer.

        Args:
            what: What the user has called.

        Raises:
            RanksDifferError: On every rank; they do not.
        """
        if self.world_size == 1 or not self._from_rank_to_rank:
            return
        number = zlib.crc32(what.encode())
        extremes = torch.tensor([number, -number])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        if extremes.tolist() != [number, -number]:
            raise RanksDifferError(
                f"{this_rank()}: {what} has met something else on another rank, and both wait for all ranks; call"
                " the same on every rank, in the same order"
            )

    def any_rank(self, flag: Tensor) -> None:
        """Let a number be the largest one of all ranks."""
        if self.world_size > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)

    def sum_over_ranks(self, value: Tensor) -> None:
        """Let a number be the sum over all ranks."""
        if self.world_size > 1:
            dist.all_reduce(value, group=self._group)

    def objects_of_all(self, own: Any) -> list[Any]:
        """What every rank has, in their order."""
        everyone: list[Any] = [own] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(everyone, own, group=self._group)
        return everyone

    def _reduce_scatter_tensor(self, flat: Tensor) -> ReduceScatter:
        size = self.shard_numel(flat.numel(), flat.element_size())
        missing = size * self.world_size - flat.numel()
        whole = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
        shard = flat.new_empty(size)
        return ReduceScatter(
            Transfer([torch_internals.reduce_scatter_single(shard, whole, self._for_gradients)]), [shard], flat
        )

    def _shards(self, flat: Tensor) -> list[Tensor]:
        size = self.shard_numel(flat.numel(), flat.element_size())
        return [flat[min(rank * size, flat.numel()) : (rank + 1) * size] for rank in range(self.world_size)]


def _wait_for_others(gathers: Sequence[Transfer]) -> None:
    """Let other ranks have what this one has stepped, if they come for it."""
    for gather in list(gathers):
        gather.wait_for_others()


def _exchange(
    group: dist.ProcessGroup, sent: dict[int, Tensor], received: dict[int, Tensor], tag: int
) -> list[dist.Work]:
    """Receive from each rank and send to each, what has elements."""
    with torch_internals.unprofiled_messages():
        works = [group.recv([into], rank, tag) for rank, into in received.items() if into.numel()]
        return works + [group.send([part], rank, tag) for rank, part in sent.items() if part.numel()]
