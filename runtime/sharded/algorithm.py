"""Reduces gradients to shards, and gathers parameters after the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

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
from ddp_compile.runtime.sharded.joint_step import JointStep
from ddp_compile.runtime.sharded.optimizer import SteppedPieces
from ddp_compile.runtime.sharded.owners import Owners
from ddp_compile.runtime.sharded.reader import ParameterReader
from ddp_compile.runtime.sharded.transfers import ReducedShard, ShardTransfers


class ShardedAlgorithm(CommAlgorithm, Sharding):
    """Reduces each bucket to one shard for each rank, whose optimizers step the pieces of parameters in that shard.

    After all optimizers with a parameter in a bucket have stepped, its parameters are gathered, see `JointStep`.
    `ParameterReader` waits for them before they are read.

    Args:
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
                "a sharded optimizer takes no DTensors, of which a rank has a part already; use fully_shard for these"
                " modules, or leave the optimizer as it is"
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
        self._reader = ParameterReader(self._parameters, self._overlaps)
        self._step = JointStep(self._optimizers, self._reader, self._gradients)
        for optimizer in self._optimizers:
            optimizer.attach(self._step, self._reader, self._gradients, self._transfers)

    def detach(self, together: bool) -> None:
        """Give the parameters memory of their own, and the optimizer its whole states; see `CommAlgorithm.detach`."""
        if together:
            self.refuse_missing_steps()
        gradients: dict[int, Tensor] = {}
        try:
            self._reader.wait()
            if together and self.buckets:
                gradients = self._whole_gradients("giving back what is sharded")
        except BaseException:
            for optimizer in self._optimizers:
                optimizer.detach(together=False)  # the other ranks may be gone
            raise
        for optimizer in self._optimizers:
            optimizer.detach(together)
        for bucket in self.buckets:
            bucket.leave()
        self._gradients.replace(gradients)
        self._reader.buckets = ()
        if together:
            close_groups(self._own_groups, self._process_group, self._parameters[0].device)

    def refuse_missing_steps(self) -> None:
        """See `Sharding.refuse_missing_steps`."""
        self._step.refuse_missing_steps()

    @property
    def buckets(self) -> Sequence[ShardedBucket]:
        """In plan order; none before the end of the first backward."""
        return self._reader.buckets

    # Gradients.

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        """See `CommAlgorithm.launch`."""
        cut = self._cuts.get(bucket.param_indices)
        if cut is None:
            cut = self._cuts[bucket.param_indices] = self._transfers.cut(bucket.spec)
        return self._transfers.reduce_scatter(bucket.flat, cut)

    def hand_over(self, buckets: Sequence[Bucket], launched: Sequence[Bucket], untouched: Set[int]) -> None:
        """Add to ``.grad`` of each piece its part of the mean, and hide the gradients of the parameters."""
        if not self.buckets:
            self._shard(buckets)
        self._step.refuse_half_a_step()  # with weights half stepped, each rank would have computed with others
        shards = {index: _shard_of(bucket) for bucket in launched for index in bucket.param_indices}
        reduced = shards.keys() - untouched
        for optimizer in self._optimizers:
            optimizer.refuse_stale(reduced)
        for optimizer in self._optimizers:
            optimizer.accumulate(shards, reduced)
        self._gradients.show(reduced)

    def _shard(self, buckets: Sequence[Bucket]) -> None:
        for optimizer in self._optimizers:
            if objection := optimizer.objection_of_all("the first backward with a sharded optimizer"):
                raise ReplicationError(objection)
        self._lay_out(buckets)
        for optimizer in self._optimizers:
            optimizer.shard(self.buckets)

    def _lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Move the parameters into the flat buffers of these buckets, and have other pieces."""
        shared = self._transfers, self._master_weights
        # They are read here and then freed, and may have been allocated on another stream.
        streams.used_here([bucket.flat for bucket in self.buckets] or [p.detach() for p in self._parameters])
        self._reader.buckets = tuple(ShardedBucket(bucket, *shared) for bucket in buckets)
        self._gradients.pieces = [piece for bucket in self.buckets for piece in bucket.pieces]

    def zero_gradients(self, set_to_none: bool) -> None:
        """See `Sharding.zero_gradients`."""
        self._gradients.zero(set_to_none)

    def record_into(self, records: NoRecords) -> None:
        """See `Sharding.record_into`."""
        self._reader.records = records

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
        self._step.end_left_out()  # its gathers come first on all ranks, whether or not they have read since
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
        self._step.end_left_out()  # as in `clip_grad_norm_`
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
            self._gradients.forward_ends()
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
        return [
            f"this rank steps {own} of {self._num_elements} elements; gathered parameters are waited for {when}",
            *(owners.describe() for owners in self._owners_of_optimizers),
        ]


def _shard_of(bucket: Bucket) -> Tensor:
    """This rank's part of the mean of a bucket."""
    assert isinstance(bucket.iteration.work, ReducedShard)
    return bucket.iteration.work.shard
