"""Reduces gradients to shards, and gathers parameters after the optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.runtime.algorithms.flat_parameters import FLOATING
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm, Pending, Traits
from ddp_compile.runtime.buckets.sharding import Sharding
from ddp_compile.runtime.comm import streams
from ddp_compile.runtime.comm.process_groups import close_groups, group_of
from ddp_compile.runtime.comm.step_records import NoRecords
from ddp_compile.runtime.comm.transfers import objection_to_messages
from ddp_compile.runtime.sharded.bucket import ShardedBucket
from ddp_compile.runtime.sharded.cut import Cut
from ddp_compile.runtime.sharded.gradients import ShardedGradients, norm_over_ranks
from ddp_compile.runtime.sharded.optimizer import SteppedPieces
from ddp_compile.runtime.sharded.owners import Owners
from ddp_compile.runtime.sharded.parameters import ShardedParameters
from ddp_compile.runtime.sharded.transfers import ShardTransfers


class ShardedAlgorithm(CommAlgorithm, Sharding):
    """Reduces each bucket to one shard for each rank, whose optimizers step the pieces of parameters in that shard.

    `ShardedParameters` gathers what they have stepped.

    Args:
        process_group: The ranks that the gradients are averaged over.
        optimizers: Each reduced parameter is in one of them.
        names: Of the reduced parameters, in registration order.
        owners: Of the optimizers that step whole parameters.
        master_weights: Step parameters of low precision in float32.
        overlaps: Gathers may be under way when a step returns.

    Sources: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), its first stage; Megatron-core's distributed optimizer,
    whose gathers overlap with the next forward too.
    """

    name = "sharded optimizer"
    traits = Traits(on_one_rank=True, takes_sparse=False, takes_dtypes=FLOATING, keeps_buckets=True)
    gathers_parameters = True

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        optimizers: Sequence[SteppedPieces],
        names: Sequence[str],
        owners: Sequence[Owners],
        master_weights: bool,
        overlaps: bool,
    ) -> None:
        self._process_group = process_group
        self._own_groups: tuple[dist.ProcessGroup, ...] = ()
        self._optimizers = tuple(optimizers)
        self._names = tuple(names)
        self.owners = {index: rank for each in owners for index, rank in each.rank_of.items()}
        self._owners_of_optimizers = tuple(owners)
        self._master_weights = master_weights
        self._overlaps = overlaps
        self._cuts: dict[tuple[int, ...], Cut] = {}  # of buckets, by the numbers of their parameters

    @property
    def sharding(self) -> Sharding:
        """See `CommAlgorithm.sharding`."""
        return self

    def objection(self, parameters: Mapping[str, Parameter]) -> str:
        """See `CommAlgorithm.objection`."""
        if any(map(torch_internals.is_dtensor, parameters.values())):
            return (
                "a sharded optimizer takes no DTensors, which are divided among ranks already; use fully_shard for"
                " these modules, or do not shard the optimizer"
            )
        if self.owners:
            device = next(iter(parameters.values())).device
            return objection_to_messages("sharded optimizer of whole parameters", self._process_group, device)
        return ""

    def attach(self, parameters: Mapping[str, Parameter]) -> None:
        """Make process groups of its own, for gathers and for gradients; take over the optimizer's steps."""
        ranks = dist.get_process_group_ranks(self._process_group)
        device = next(iter(parameters.values())).device
        gathers = gradients = self._process_group
        if len(ranks) > 1:
            gathers, gradients = (group_of(ranks, self._process_group, device) for _ in range(2))
            self._own_groups = (gathers, gradients)
            self.shares_process_group = False
        self._parameters = list(parameters.values())
        self._num_elements = sum(parameter.numel() for parameter in self._parameters)
        self._gradients = ShardedGradients(self._parameters, self._names)
        self._transfers = ShardTransfers(gathers, gradients, device)
        self._sharded = ShardedParameters(
            self._parameters, self._optimizers, self._gradients, self._transfers, self._overlaps
        )
        for optimizer in self._optimizers:
            optimizer.attach(self._sharded)

    def detach(self, together: bool) -> None:
        """Give the parameters memory of their own, and the optimizer its whole states; see `CommAlgorithm.detach`."""
        gradients: dict[int, Tensor] = {}
        if together:
            self.refuse_missing_steps()
            self._gradients.take_edits()
        try:
            self._sharded.wait()
            if together and self.buckets:
                gradients = self._whole_gradients("undoing shard_optimizer")
        except BaseException:
            for optimizer in self._optimizers:
                optimizer.detach(together=False)  # the other ranks may be gone
            raise
        for optimizer in self._optimizers:
            optimizer.detach(together)
        for bucket in self.buckets:
            bucket.leave()
        self._gradients.give_back(gradients)
        self._sharded.buckets = ()
        if together:
            close_groups(self._own_groups, self._process_group, self._parameters[0].device)

    def refuse_missing_steps(self) -> None:
        """See `Sharding.refuse_missing_steps`."""
        self._sharded.refuse_missing_steps()

    @property
    def buckets(self) -> Sequence[ShardedBucket]:
        """In plan order; none before the end of the first backward."""
        return self._sharded.buckets

    # Gradients.

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        """See `CommAlgorithm.launch`."""
        cut = self._cuts.get(bucket.param_indices)
        if cut is None:
            cut = self._cuts[bucket.param_indices] = self._transfers.cut(bucket.spec)
        return self._transfers.reduce_scatter(bucket.flat, cut)

    def holds_gradients(self) -> bool:
        """See `Sharding.holds_gradients`."""
        gradients = [piece.gradient for bucket in self.buckets for piece in bucket.own_pieces]
        return any(gradient is not None and bool(gradient.any()) for gradient in gradients)

    def hand_over(self, buckets: Sequence[Bucket], launched: Sequence[Bucket], untouched: Set[int]) -> None:
        """Add to ``.grad`` of each piece its part of the mean, and hide the gradients of the parameters."""
        if not self.buckets:
            self._shard(buckets)
        self._sharded.refuse_half_a_step()  # the ranks would have computed with different, half-stepped weights
        shards = {index: _shard_of(bucket) for bucket in launched for index in bucket.param_indices}
        reduced = shards.keys() - untouched
        for optimizer in self._optimizers:
            optimizer.accumulate(shards, reduced)
        self._gradients.hide(reduced)

    def _shard(self, buckets: Sequence[Bucket]) -> None:
        """Move the parameters into flat buffers, and let the optimizers step this rank's pieces."""
        for optimizer in self._optimizers:
            if objection := optimizer.objection_of_all("the first backward with a sharded optimizer"):
                raise ReplicationError(objection)
        # The parameters are read here and then freed, and may have been allocated on another stream.
        streams.used_here([parameter.detach() for parameter in self._parameters])
        sharded = tuple(ShardedBucket(bucket, self._transfers, self._master_weights) for bucket in buckets)
        self._sharded.buckets = sharded
        self._gradients.pieces = {piece.index: piece for bucket in sharded for piece in bucket.pieces}
        for optimizer in self._optimizers:
            optimizer.shard(sharded)

    def zero_gradients(self, set_to_none: bool) -> None:
        """See `Sharding.zero_gradients`."""
        self._gradients.zero(set_to_none)

    def record_into(self, records: NoRecords) -> None:
        """See `Sharding.record_into`."""
        self._sharded.records = records

    def backward_begins(self) -> None:
        """See `Sharding.backward_begins`."""
        self._gradients.make_way(in_backward=True)

    def _whole_gradients(self, what: str) -> dict[int, Tensor]:
        gradients: dict[int, Tensor] = {}
        with self._transfers.on_every_rank(what):
            for bucket in self.buckets:
                gradients |= bucket.whole_gradients()
        return gradients

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor | None:
        """See `Sharding.clip_grad_norm_`."""
        if not self.buckets:
            return None
        self._gradients.before_reading("model.clip_grad_norm_()")
        self._sharded.end_left_out()  # first, so that its gathers come in the same place on all ranks
        pieces = [piece.stepped for bucket in self.buckets for piece in bucket.own_pieces]
        with self._transfers.on_every_rank("model.clip_grad_norm_()"):
            total = norm_over_ranks(pieces, float(norm_type), self._parameters, self._transfers)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"{this_rank()}: the total norm of order {norm_type} of the gradients is {total.item()}, so they"
                " cannot be clipped; find what is not finite, or pass error_if_nonfinite=False"
            )
        clip_grads_with_norm_(pieces, max_norm, total)
        return total

    def full_gradients(self, named: Mapping[str, Parameter]) -> dict[str, Tensor]:
        """See ``ReplicatedModule.full_gradients``."""
        if not self.buckets:
            return super().full_gradients(named)
        self._gradients.before_reading("model.full_gradients()")
        self._sharded.end_left_out()  # as in `clip_grad_norm_`
        gradients = self._whole_gradients("model.full_gradients()")
        return {self._names[index]: gradients[index] for index in sorted(gradients)}

    # Forwards.

    def await_parameters(self, indices: Sequence[int] | None = None) -> None:
        """See `Sharding.await_parameters`."""
        self._sharded.wait(indices)

    def before_forward(self, synchronize: bool) -> None:
        """See `CommAlgorithm.before_forward`."""
        self._sharded.before_forward()
        self._gradients.make_way()

    def forward_ends(self, as_one_graph: bool, has_waited: bool) -> None:
        """See `Sharding.forward_ends`."""
        if not torch_internals.is_inside_backward():  # in a checkpoint: its backward has begun
            self._gradients.hide()
        self._sharded.after_forward(as_one_graph, has_waited)

    def explain(self) -> list[str]:
        """See `Sharding.explain`."""
        if not self.buckets:
            return ["the optimizer is sharded at the end of the first backward"]
        own = sum(piece.end - piece.begin for piece in self._gradients.pieces.values())
        when = "before each forward, as it is not one compiled graph"
        if not self._overlaps:
            when = "in step(), by overlap=False"
        elif self._sharded.has_overlapped:
            when = "part by part"
        return [
            f"this rank steps {own} of {self._num_elements} elements; gathered parameters are waited for {when}",
            *(owners.describe() for owners in self._owners_of_optimizers),
        ]


def _shard_of(bucket: Bucket) -> Tensor:
    """This rank's part of the mean of a bucket."""
    assert bucket.iteration.work is not None
    return bucket.iteration.work.result()[0]
