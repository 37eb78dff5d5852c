"""The parameters of a model whose optimizers are sharded: from an optimizer's step to the next read."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ddp_compile import torch_internals
from ddp_compile.errors import ReductionError, ReplicationError, this_rank
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.sharding import Sharding
from ddp_compile.runtime.comm import error_messages, streams
from ddp_compile.runtime.comm.exchange import Exchange
from ddp_compile.runtime.comm.step_records import NO_RECORDS, NoRecords
from ddp_compile.runtime.sharded.bucket import ShardedBucket
from ddp_compile.runtime.sharded.gradients import ShardedGradients, norm_over_ranks
from ddp_compile.runtime.sharded.guard import ParameterGuard
from ddp_compile.runtime.sharded.owners import Owners
from ddp_compile.runtime.sharded.transfers import ShardTransfers

if TYPE_CHECKING:
    from ddp_compile.runtime.sharded.optimizer import SteppedPieces


class ShardedParameters(Sharding):
    """Hands gradients over as shards, and gathers each bucket after it has been stepped, before parameters are read.

    In a joint step each optimizer steps once. It begins with the first of them and ends with the last. A bucket is
    stepped when every optimizer with a parameter in it has stepped it. Stepped buckets are gathered from the last of
    the plan to its first, about the order in which a forward reads them. So ranks whose optimizers step in different
    orders still start the same gathers in the same order.

    A forward that is one compiled graph waits for each bucket at its first use. Every other reader waits for all of
    them. While a joint step is incomplete, reads raise.

    Args:
        parameters: All reduced parameters, by name, in registration order, each in one of the optimizers.
        owners: Of the optimizers that step whole parameters.
        objection: Returns why the parameters cannot be moved into flat buffers; empty if they can.
    """

    gathers_parameters = True
    transfers: ShardTransfers
    gradients: ShardedGradients

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        optimizers: Sequence[SteppedPieces],
        owners: Sequence[Owners],
        master_weights: bool,
        overlaps: bool,
        objection: Callable[[], str],
    ) -> None:
        self.owners = {index: rank for each in owners for index, rank in each.rank_of.items()}
        self.buckets: Sequence[ShardedBucket] = ()  #: in plan order; none before the end of the first backward
        self._parameters = list(parameters.values())
        self._names = list(parameters)
        self._num_elements = sum(parameter.numel() for parameter in self._parameters)
        self._optimizers = optimizers
        self._owners_of_optimizers = owners
        self._master_weights = master_weights
        self._objection = objection
        self._records: NoRecords = NO_RECORDS  # of gathers and waits for them
        self._overlaps = overlaps
        #: Cleared by the first forward of which Python runs a part: Python could read any parameter.
        self._overlaps_forward = overlaps
        self._has_overlapped = False  # whether the last forward waited for each bucket at its first use
        self._guard = ParameterGuard(self._parameters, self._await_all)
        # Between the steps of several optimizers reads are refused, also if no gather overlaps with anything.
        self._is_guarded = overlaps or len(optimizers) > 1
        self._process = os.getpid()
        self._stop_watching: Callable[[], None] | None = None
        self._num_steps = 0
        self._due: list[SteppedPieces] = []  # those that have not stepped since the first one did
        self._stepping: SteppedPieces | None = None  # its step has begun and not ended
        self._stepping_thread = 0
        self._changed: set[int] = set()  # numbers of the parameters that this joint step may have changed
        self._to_gather: list[ShardedBucket] = []  # in plan order; the last one is next
        self._stepped: set[ShardedBucket] = set()
        self._ended: list[streams.Event] = []  # the steps so far, which may have run on other streams

    def attach(self, transfers: ShardTransfers) -> None:
        """Take over the optimizers' steps."""
        self.transfers = transfers
        self.gradients = ShardedGradients(self._parameters, self._names)
        for optimizer in self._optimizers:
            optimizer.attach(self)

    def detach(self, together: bool) -> None:
        """Give parameters memory of their own, and optimizers their whole states; see `CommAlgorithm.detach`."""
        gradients: dict[int, Tensor] = {}
        if together:
            self.refuse_missing_steps()
            self.gradients.take_edits()
        try:
            self.await_parameters()
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
        self.gradients.give_back(gradients)
        self.buckets = ()

    # Gradients.

    def backward_begins(self) -> None:
        self.gradients.make_way(in_backward=True)

    def hand_over(self, buckets: Sequence[Bucket], launched: Sequence[Bucket], untouched: Set[int]) -> None:
        """Add to ``.grad`` of each piece its part of the mean, and hide the gradients of the parameters."""
        if not self.buckets:
            self._shard(buckets)
        self.refuse_half_a_step()  # the ranks would have computed with different, half-stepped weights
        shards = {index: _shard_of(bucket) for bucket in launched for index in bucket.param_indices}
        reduced = shards.keys() - untouched
        for optimizer in self._optimizers:
            optimizer.accumulate(shards, reduced)
        self.gradients.hide(reduced)

    def _shard(self, buckets: Sequence[Bucket]) -> None:
        """Move the parameters into flat buffers, and let the optimizers step this rank's pieces."""
        own = next(filter(None, (*(optimizer.edit() for optimizer in self._optimizers), self._objection())), "")
        with self.transfers.on_every_rank("the first backward with a sharded optimizer"):
            of_all = self.transfers.objects_of_all(own and f"{this_rank()}: {own}")
        for objection in filter(None, of_all):
            raise ReplicationError(objection)
        # The parameters are read here and then freed, and may have been allocated on another stream.
        streams.used_here([parameter.detach() for parameter in self._parameters])
        self.buckets = tuple(ShardedBucket(bucket, self.transfers, self._master_weights) for bucket in buckets)
        self.gradients.pieces = {piece.index: piece for bucket in self.buckets for piece in bucket.pieces}
        for optimizer in self._optimizers:
            optimizer.shard(self.buckets)

    def holds_gradients(self) -> bool:
        gradients = [piece.gradient for bucket in self.buckets for piece in bucket.own_pieces]
        return any(gradient is not None and bool(gradient.any()) for gradient in gradients)

    def zero_gradients(self, set_to_none: bool) -> None:
        self.gradients.zero(set_to_none, range(len(self._parameters)))

    def clip_grad_norm_(
        self, rest: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor | None:
        if not self.buckets:
            return None
        self.gradients.before_reading("model.clip_grad_norm_()")
        self._end_left_out()  # first, so that its gathers come in the same place on all ranks
        pieces = [piece.stepped for bucket in self.buckets for piece in bucket.own_pieces]
        with self.transfers.on_every_rank("model.clip_grad_norm_()"):
            total = norm_over_ranks(pieces, float(norm_type), self._parameters, self.transfers)
        if unsharded := [parameter for parameter in rest if parameter.grad is not None]:
            norm = get_total_norm([p.grad for p in unsharded if p.grad is not None], float(norm_type))
            total = torch.linalg.vector_norm(torch.stack([total, norm.to(total)]), float(norm_type))
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"{this_rank()}: the total norm of order {norm_type} of the gradients is {total.item()}, so they"
                " cannot be clipped; find what is not finite, or pass error_if_nonfinite=False"
            )
        clip_grads_with_norm_([*pieces, *unsharded], max_norm, total)
        return total

    def full_gradients(self, named: Mapping[str, Parameter]) -> dict[str, Tensor]:
        """See ``ReplicatedModule.full_gradients``."""
        if not self.buckets:
            return super().full_gradients(named)
        self.gradients.before_reading("model.full_gradients()")
        self._end_left_out()  # as in `clip_grad_norm_`
        gradients = self._whole_gradients("model.full_gradients()")
        return {self._names[index]: gradients[index] for index in sorted(gradients)}

    def _whole_gradients(self, what: str) -> dict[int, Tensor]:
        gradients: dict[int, Tensor] = {}
        with self.transfers.on_every_rank(what):
            for bucket in self.buckets:
                gradients |= bucket.whole_gradients()
        return gradients

    # A step.

    def step_begins(self, optimizer: SteppedPieces) -> None:
        """An optimizer is about to step its pieces; refused if half a step has been taken."""
        streams.refuse_capture(optimizer.buckets[0].flat.device, "a step of a sharded optimizer")
        is_first = self._stepping is not None or optimizer not in self._due
        if is_first:
            self.refuse_half_a_step()
        self.gradients.before_reading("optimizer.step()")  # it may raise, and then no step has begun
        if is_first:
            self.await_parameters()  # for the step before, if no forward came between
            for bucket in self.buckets:
                bucket.take_edits()
            self._num_steps += 1
            self._due = list(self._optimizers)
            self._to_gather, self._stepped = list(self.buckets), set()
            self._changed, self._ended = set(), []
        self._changed |= {piece.index for piece in optimizer.pieces if piece.stepped.grad is not None}
        self._stepping, self._stepping_thread = optimizer, threading.get_ident()
        self._raise_guard()

    def bucket_is_stepped(self, bucket: ShardedBucket, optimizer: SteppedPieces) -> None:
        """An optimizer has stepped its pieces in a bucket; gather the stepped buckets whose turn it is."""
        self._raise_guard()  # the step itself may have read parameters
        if any(other is not optimizer and bucket in other.buckets for other in self._due):
            return
        self._stepped.add(bucket)
        while self._to_gather and self._to_gather[-1] in self._stepped:
            self._gather(self._to_gather.pop())

    def _gather(self, bucket: ShardedBucket) -> None:
        for event in self._ended:
            event.wait()
        with Exchange(self._gather_failed, profiled=f"ddp_compile::bucket_{bucket.spec.index}_gather"):
            transfer = self._records.launch_begins("gather", bucket.spec.index, bucket.spec.num_bytes)
            self._records.launch_ends(transfer, bucket.gather(self._changed))

    def step_ends(self, optimizer: SteppedPieces) -> None:
        """An optimizer has stepped all its pieces. After the last one, all buckets are being gathered."""
        self._due.remove(optimizer)
        self._stepping, self._stepping_thread = None, 0
        if self._due:
            self._ended.append(streams.record(optimizer.buckets[0].flat.device))
        elif not self._overlaps:
            self.await_parameters()

    def refuse_missing_steps(self) -> None:
        """Raise a ReplicationError if some of the optimizers have stepped and others can still step."""
        if self._stepping is None:
            self.refuse_half_a_step()

    def refuse_half_a_step(self) -> None:
        """Raise a ReplicationError if a step has raised, or if some optimizers have stepped and others have not."""
        if self._stepping is not None:
            raise ReplicationError(
                f"{this_rank()}: {self._stepping.name}.step() has raised before all parameters were stepped, so the"
                " ranks have diverged; start again from a checkpoint, with a new model and a new optimizer"
            )
        self._end_left_out()
        if self._due:
            names = ", ".join(optimizer.name for optimizer in self._due)
            raise ReplicationError(
                f"{this_rank()}: half a step: of the {len(self._optimizers)} optimizers that were sharded together,"
                f" {names} has not stepped since the others did. Call step() of each of them, one after the other,"
                " before a forward or anything else reads parameters"
            )

    def _end_left_out(self) -> None:
        """Count optimizers whose steps a GradScaler leaves out as stepped, which may start gathers."""
        for optimizer in [each for each in self._due if each.is_left_out()]:
            for bucket in optimizer.buckets:
                self.bucket_is_stepped(bucket, optimizer)
            self.step_ends(optimizer)

    # Reads.

    def record_into(self, records: NoRecords) -> None:
        self._records = records

    def await_parameters(self, indices: Sequence[int] | None = None) -> None:
        if indices is None:
            self._await_all()
            self._guard.take_down()
        else:
            wanted = set(indices)
            for bucket in reversed(self.buckets):
                if not wanted.isdisjoint(bucket.param_indices):
                    self._await(bucket)

    def _await_all(self) -> None:
        # Other threads may read while this one steps, and so may the step's own code.
        stepping = self._stepping_thread
        if not stepping or (stepping == threading.get_ident() and not torch_internals.inside_optimizer_step()):
            self.refuse_half_a_step()
        for bucket in reversed(self.buckets):
            self._await(bucket)

    def _await(self, bucket: ShardedBucket) -> None:
        if not bucket.is_gathering:
            bucket.wait()
            return
        if os.getpid() != self._process:
            raise ReplicationError(
                f"{this_rank()}: a parameter is read in a process that was forked after optimizer.step(), before the"
                " other ranks' parts of it had come, and they come to the parent alone. Call model.await_parameters()"
                " before the fork, or shard_optimizer(..., overlap=False)"
            )
        index = bucket.spec.index
        profiled = f"ddp_compile::bucket_{index}_gather_wait"
        with Exchange(self._gather_failed, profiled=profiled, records=self._records, transfer=("gather", index)):
            bucket.wait()

    def _raise_guard(self) -> None:
        if self._is_guarded:
            self._guard.raise_up()

    def _gather_failed(self, error: RuntimeError) -> ReductionError:
        self._raise_guard()  # a forward may have taken it down
        return error_messages.exchange_failed(f"gather of parameters after step {self._num_steps}", error)

    # A forward.

    def before_forward(self) -> None:
        """Leave gathers under way only if nothing but one compiled graph is going to read the parameters."""
        if not torch_internals.inside_optimizer_step():
            self.refuse_half_a_step()
        if self._overlaps_forward:
            self._guard.take_down()
            self._watch_compilations()
        else:
            self.await_parameters()
        self.gradients.make_way()

    def forward_ends(self, as_one_graph: bool, has_waited: bool) -> None:
        if not torch_internals.is_inside_backward():  # in a checkpoint: its backward has begun
            self.gradients.hide()
        self._end_watching()
        if not (as_one_graph or has_waited):
            self._overlaps_forward = False
        self._has_overlapped = self._overlaps_forward and not has_waited
        self.await_parameters()

    def _watch_compilations(self) -> None:
        """A compilation means that this forward runs another graph than the last one, perhaps with graph breaks."""
        self._end_watching()
        alive = weakref.ref(self)  # torch keeps the callbacks if a forward never ends

        def begins(_number: str) -> None:
            if (parameters := alive()) is not None:
                parameters.await_parameters()

        self._stop_watching = torch_internals.watch_compilations(begins, lambda: None)

    def _end_watching(self) -> None:
        if self._stop_watching is not None:
            self._stop_watching()
            self._stop_watching = None

    def explain(self) -> list[str]:
        if not self.buckets:
            return ["the optimizer is sharded at the end of the first backward"]
        own = sum(piece.end - piece.begin for bucket in self.buckets for piece in bucket.own_pieces)
        when = "before each forward, as it is not one compiled graph"
        if not self._overlaps:
            when = "in step(), by overlap=False"
        elif self._has_overlapped:
            when = "part by part"
        return [
            f"this rank steps {own} of {self._num_elements} elements; gathered parameters are waited for {when}",
            *(owners.describe() for owners in self._owners_of_optimizers),
        ]


def _shard_of(bucket: Bucket) -> Tensor:
    """This rank's part of the mean of a bucket."""
    assert bucket.iteration.work is not None
    return bucket.iteration.work.result()[0]
