"""How gradients travel to the ranks that step them, and how stepped parameters travel back.

Each process group has a pair of transfers: a reduce-scatter for gradients and an all-gather for parameters. For buckets
in which parameters have owners, so that ranks keep unequal parts, both are messages from rank to rank: a reduce-scatter
or an all-gather would have to pad all parts to the longest.

Note [Point to point on gloo]
gloo's reduce-scatter moves as much as its all-reduce, and its all-gather takes three times as long as messages from
rank to rank (23 MiB, two ranks, torch 2.13: 56 ms and 18 ms). So on gloo each rank sends every other one its part, and
adds up what it gets in the order of the ranks; with two ranks that is bit for bit what an all-reduce gives. The other
backends have ``reduce_scatter_tensor`` and ``all_gather_into_tensor``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.errors import RanksDifferError, on_ranks, this_rank
from ddp_compile.runtime.comm import streams
from ddp_compile.runtime.comm.collectives import ranks_unlike_rank_0
from ddp_compile.runtime.comm.exchange import Exchange
from ddp_compile.runtime.comm.process_groups import objects_of_all
from ddp_compile.runtime.comm.transfers import Transfer, keep_after
from ddp_compile.runtime.sharded.cut import Cut

#: Tag of the messages of a reduction; gathers have smaller ones.
REDUCTION_TAG = 2**15


def _reduction(works: Sequence[dist.Work], parts: Sequence[Tensor], flat: Tensor) -> Transfer:
    """The transfer whose result is this rank's shard, on memory of its own: the sum of the ranks' parts in their order.

    ``flat`` is what is sent, kept until it has been.
    """
    return Transfer(works, then=partial(_add_up, parts, flat))


def _add_up(parts: Sequence[Tensor], flat: Tensor, _values: object) -> list[Tensor]:
    streams.used_here([*parts, flat])  # allocated where the bucket was launched, and not held after this
    total, *others = parts
    if others:
        total = total.add(others[0])  # not in place: it may lie in the flat buffer, which can be sent again
        for part in others[1:]:
            total.add_(part)
    return [total]


def _reduce_scatter_by_collective(group: dist.ProcessGroup, flat: Tensor, cut: Cut) -> Transfer:
    numel = cut.shard_numel * group.size()
    if flat.untyped_storage().nbytes() < numel * flat.element_size():  # nothing is reserved in the first backward
        flat = torch.nn.functional.pad(flat, (0, numel - flat.numel()))
    whole = flat.as_strided((numel,), (1,))
    shard = flat.new_empty(cut.shard_numel)
    return _reduction([torch_internals.reduce_scatter_single(shard, whole, group)], [shard], flat)


class ShardTransfers:
    """Sends shards between the ranks of process groups that nobody else uses.

    Gathers and gradients have a group each, of the same ranks: if one rank has left out a step, no gather meets a
    reduction of another rank. Both wait until the timeout reports it.
    """

    def __init__(self, for_gathers: dist.ProcessGroup, for_gradients: dist.ProcessGroup, device: torch.device) -> None:
        self._group = for_gathers
        self._gradients_group = for_gradients
        self._device = device
        self.rank = for_gathers.rank()
        self.world_size = for_gathers.size()
        self._others = [rank for rank in range(self.world_size) if rank != self.rank]
        self._is_gloo = torch_internals.backend_name(for_gathers, device) == "gloo"
        # gloo reads messages at the tensor's data pointer, which has to point to host memory.
        self._by_messages = self._is_gloo and not streams.has_streams(device)
        self._gathers: list[Transfer] = []  # those that may not have been waited for
        self._num_gathers = 0
        if streams.work_blocks_host(for_gathers, device):
            keep_after(self, partial(_wait_for_others, self._gathers))

    def reduce_scatter(self, flat: Tensor, cut: Cut) -> Transfer:
        """Start to add up a flat buffer, shape (n,), over the ranks; the result is the sum of what this one keeps."""
        if self.world_size == 1:
            return _reduction((), [flat.clone()], flat)
        if cut.is_even and not self._by_messages:
            return _reduce_scatter_by_collective(self._gradients_group, flat, cut)
        own = cut.parts_of(self.rank, flat)
        contributions = flat.new_empty((len(self._others), sum(map(len, own))))
        into = dict(zip(self._others, contributions, strict=True))
        received = {other: list(row.split([part.numel() for part in own])) for other, row in into.items()}
        sent = {other: cut.parts_of(other, flat) for other in self._others}
        works = self._exchange(self._gradients_group, sent, received, REDUCTION_TAG)
        mine = own[0] if len(own) == 1 else torch.cat(own) if own else flat[:0]
        return _reduction(works, [into.get(each, mine) for each in range(self.world_size)], flat)

    def all_gather(self, flat: Tensor, cut: Cut) -> Transfer:
        """Start to give every rank what the others keep of a flat buffer; on every rank in the same order."""
        if self.world_size == 1:
            return Transfer()
        self._num_gathers += 1
        if cut.is_even and not self._by_messages:
            shard = flat[self.rank * cut.shard_numel :][: cut.shard_numel]
            gather = Transfer([torch_internals.all_gather_single(flat, shard, self._group)])
        else:
            sent = dict.fromkeys(self._others, cut.parts_of(self.rank, flat))
            received = {other: cut.parts_of(other, flat) for other in self._others}
            # With their number as the tag, messages of a rank that has left out a step do not reach the others in the
            # place of the next step's.
            gather = Transfer(self._exchange(self._group, sent, received, self._num_gathers % REDUCTION_TAG))
        self._gathers[:] = [each for each in self._gathers if not each.is_done] + [gather]
        return gather

    def _exchange(
        self,
        group: dist.ProcessGroup,
        sent: Mapping[int, Sequence[Tensor]],
        received: Mapping[int, Sequence[Tensor]],
        tag: int,
    ) -> list[dist.Work]:
        incoming = [(rank, part) for rank, parts in received.items() for part in parts]
        outgoing = [(rank, part) for rank, parts in sent.items() for part in parts]
        with torch_internals.unprofiled_messages():
            if self._is_gloo:
                works: list[dist.Work] = [group.recv([part], rank, tag) for rank, part in incoming]
                return works + [group.send([part], rank, tag) for rank, part in outgoing]
            operations = [  # NCCL needs all of a bucket at once
                dist.P2POp(function, part, dist.get_global_rank(group, rank), group, tag)
                for function, parts in ((dist.irecv, incoming), (dist.isend, outgoing))
                for rank, part in parts
            ]
            return dist.batch_isend_irecv(operations) if operations else []

    @contextmanager
    def on_every_rank(self, what: str) -> Iterator[None]:
        """Wrap a wait for all ranks in the user's call ``what``: raise if a rank does not come or calls another.

        gloo ends a process whose message has another size. Between the steps of two optimizers, ranks that step them in
        different orders have started different numbers of gathers. Compared with gloo alone: with NCCL the host would
        wait for the GPU to have the answer.
        """
        with Exchange(f"{what}, to be called on every rank,"):
            here = f"{what} after {self._num_gathers} gathers".encode()
            is_compared = self._by_messages and self.world_size > 1
            if is_compared and (different := ranks_unlike_rank_0(here, self._group, self._device)):
                raise RanksDifferError(
                    f"{this_rank()}: {what} waits for all ranks, but {on_ranks(different)} another call waits than on"
                    " rank 0, or the same one between other steps of optimizers; call the same on every rank, in the"
                    " same order"
                )
            yield

    def all_reduce(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """Set small values to their sum over all ranks, or to their maximum."""
        if self.world_size > 1:
            dist.all_reduce(values, operation, group=self._group)

    def objects_of_all(self, own: Any) -> list[Any]:
        """The objects of all ranks, in their order."""
        return objects_of_all(own, self._group, self._device)


def _wait_for_others(gathers: Sequence[Transfer]) -> None:
    """Let other ranks fetch what this one has stepped."""
    for gather in list(gathers):
        gather.wait_for_others()
