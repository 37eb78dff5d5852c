"""Reduces gradients to shards, and gathers parameters after the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_

from ddp_compile import torch_internals
from ddp_compile.errors import this_rank
from ddp_compile.runtime.algorithms.flat_parameters import FLOATING
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm, Pending, Traits
from ddp_compile.runtime.buckets.local_tensors import has_dtensors
from ddp_compile.runtime.buckets.sharding import Sharding
from ddp_compile.runtime.comm.process_groups import group_of
from ddp_compile.runtime.sharded.bucket import Piece, ShardedBucket
from ddp_compile.runtime.sharded.gradients import ShardedGradients, norm_over_ranks
from ddp_compile.runtime.sharded.optimizer import SteppedPieces
from ddp_compile.runtime.sharded.reader import ParameterReader
from ddp_compile.runtime.sharded.transfers import ReducedShard, ShardTransfers


class ShardedAlgorithm(CommAlgorithm, Sharding):
    """Reduces each bucket to one shard for each rank; the rank's optimizer steps the pieces of parameters in its shard.

    After the step of a bucket its parameters are gathered. `ParameterReader` waits for them before they are read.

    Sources: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), its first stage; Megatron-core's distributed optimizer,
    whose gathers overlap with the next forward too.
    """

    name = "sharded optimizer"
    traits = Traits(on_one_rank=True, takes_sparse=False, takes_dtypes=FLOATING, keeps_buckets=True)
    gathers_parameters = True

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        optimizer: SteppedPieces,
        names: Sequence[str],
        master_weights: bool,
        overlaps: bool,
    ) -> None:
        self._process_group = process_group
        self._optimizer = optimizer
        self._names = tuple(names)
        self._master_weights = master_weights
        self._overlaps = overlaps
        # A parameter without elements of each dtype, so that a GradScaler finds gradients on every rank, and asks all.
        self._witnesses: list[Piece] = []

    @property
    def sharding(self) -> Sharding:
        """See `CommAlgorithm.sharding`."""
        return self

    def objection(self, parameters: Mapping[str, Parameter]) -> str:
        """See `CommAlgorithm.objection`."""
        if has_dtensors(list(parameters.values())):
            return (
                "a sharded optimizer takes no DTensors, of which a rank has a part already; use fully_shard for these"
                " modules, or leave the optimizer as it is"
            )
        return ""

    def attach(self, parameters: Sequence[Parameter]) -> None:
        """Make process groups of its own, for gathers and for gradients; take over the optimizer's steps."""
        ranks = dist.get_process_group_ranks(self._process_group)
        device = parameters[0].device
        gathers = gradients = self._process_group
        if len(ranks) > 1:
            gathers, gradients = (group_of(ranks, self._process_group, device) for _ in range(2))
            self.shares_process_group = False
        self._parameters = list(parameters)
        self._num_elements = sum(parameter.numel() for parameter in parameters)
        self._gradients = ShardedGradients(self._parameters, self._names)
        self._transfers = ShardTransfers(gathers, gradients, device)
        self._reader = ParameterReader(self._parameters, self._overlaps)
        self._optimizer.attach(self._reader, self._gradients, self._transfers)

    def detach(self, together: bool) -> None:
        """Give the parameters memory of their own, and the optimizer its whole states; see `CommAlgorithm.detach`."""
        gradients: dict[int, Tensor] = {}
        try:
            self._reader.wait()
            if together and self.buckets:
                gradients = self._whole_gradients("giving back what is sharded")
        except BaseException:
            self._optimizer.detach(together=False)  # the others may be gone
            raise
        self._optimizer.detach(together)
        for bucket in self.buckets:
            bucket.leave()
        self._gradients.replace(gradients)
        self._reader.buckets = ()

    @property
    def buckets(self) -> Sequence[ShardedBucket]:
        """In plan order; none before the end of the first backward."""
        return self._reader.buckets

    # Gradients.

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        """See `CommAlgorithm.launch`."""
        return self._transfers.reduce_scatter(bucket.flat)

    def hand_over(self, buckets: Sequence[Bucket], launched: Sequence[Bucket], untouched: Set[int]) -> None:
        """Add to ``.grad`` of each piece its part of the mean, and hide the gradients of the parameters."""
        if not self.buckets:
            self._shard(buckets)
        shards = {index: _shard_of(bucket) for bucket in launched for index in bucket.param_indices}
        reduced = shards.keys() - untouched
        pieces = [piece for piece in self._gradients.pieces if piece.index in reduced]
        self._gradients.refuse_stale(pieces)
        for piece in pieces:
            piece.accumulate(shards[piece.index], self._optimizer.unscaled)
        for witness in self._witnesses:
            witness.zero(set_to_none=True)
            witness.accumulate(witness.stepped.detach(), self._optimizer.unscaled)
        self._gradients.show(reduced)

    def _shard(self, buckets: Sequence[Bucket]) -> None:
        self._optimizer.before_sharding()
        shared = self._transfers, self._master_weights
        self._reader.buckets = tuple(ShardedBucket(bucket, *shared) for bucket in buckets)
        self._gradients.pieces = [piece for bucket in self.buckets for piece in bucket.pieces]
        dtypes = sorted({bucket.stepped_dtype for bucket in self.buckets}, key=str)
        empty = [torch.empty(0, dtype=dtype, device=self._parameters[0].device) for dtype in dtypes]
        self._witnesses = [Piece(-1, 0, 0, 0, Parameter(values)) for values in empty]
        self._optimizer.shard(self.buckets, [witness.stepped for witness in self._witnesses])

    def zero_gradients(self, set_to_none: bool) -> None:
        """See `Sharding.zero_gradients`."""
        self._gradients.zero(set_to_none)

    def backward_begins(self) -> None:
        """See `Sharding.backward_begins`."""
        self._gradients.before_backward()

    def _whole_gradients(self, what: str) -> dict[int, Tensor]:
        gradients: dict[int, Tensor] = {}
        with self._transfers.on_every_rank(what):
            for bucket in self.buckets:
                gradients |= bucket.whole_gradients()
        return gradients

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        """See ``ReplicatedModule.clip_grad_norm_``."""
        if not self.buckets:
            return super().clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        self._gradients.before_reading("model.clip_grad_norm_()")
        pieces = [piece.stepped for piece in self._gradients.pieces]
        with self._transfers.on_every_rank("model.clip_grad_norm_()"):
            total = norm_over_ranks(pieces, float(norm_type), self._parameters, self._transfers)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"{this_rank()}: the total norm of order {norm_type} of the gradients is {total.item()}, so they"
                " cannot be clipped; look for what is not finite, or pass error_if_nonfinite=False"
            )
        clip_grads_with_norm_(pieces, max_norm, total)
        return total

    def full_gradients(self, named: Mapping[str, Parameter]) -> dict[str, Tensor]:
        """See ``ReplicatedModule.full_gradients``."""
        if not self.buckets:
            return super().full_gradients(named)
        self._gradients.before_reading("model.full_gradients()")
        gradients = self._whole_gradients("model.full_gradients()")
        return {self._names[index]: gradients[index] for index in sorted(gradients)}

    # Forwards.

    def await_parameters(self, indices: Sequence[int] | None = None) -> None:
        """See `Sharding.await_parameters`."""
        self._reader.wait(indices)

    def before_forward(self, synchronize: bool) -> None:
        """See `CommAlgorithm.before_forward`."""
        self._reader.before_forward()
        self._gradients.take_edits()
        self._gradients.remove()

    def forward_ends(self, as_one_graph: bool, has_waited: bool) -> None:
        """See `Sharding.forward_ends`."""
        if not torch_internals.is_inside_backward():  # in a checkpoint: its backward has begun
            self._gradients.show_again()
        self._reader.after_forward(as_one_graph, has_waited)

    def explain(self) -> list[str]:
        """See `Sharding.explain`."""
        if not self.buckets:
            return ["the optimizer is sharded at the end of the first backward"]
        own = sum(piece.end - piece.begin for piece in self._gradients.pieces)
        when = "before each forward, as it is not one compiled graph"
        if not self._overlaps:
            when = "in step(), by overlap=False"
        elif self._reader.has_overlapped:
            when = "part by part"
        return [f"this rank steps {own} of {self._num_elements} elements; gathered parameters are waited for {when}"]


def _shard_of(bucket: Bucket) -> Tensor:
    """This rank's part of the mean of a bucket."""
    assert isinstance(bucket.iteration.work, ReducedShard)
    return bucket.iteration.work.shard
