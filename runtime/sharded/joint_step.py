"""One step of all optimizers of a model, and the gathers of the buckets that they have stepped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.runtime.comm import streams
from ddp_compile.runtime.sharded.bucket import ShardedBucket
from ddp_compile.runtime.sharded.gradients import ShardedGradients
from ddp_compile.runtime.sharded.reader import ParameterReader
from ddp_compile.runtime.sharded.state import Event, State

if TYPE_CHECKING:
    from ddp_compile.runtime.sharded.optimizer import SteppedPieces


class JointStep:
    """Each optimizer steps once in a joint step, which begins with the first of them and ends with the last.

    A bucket is complete when every optimizer with a parameter in it has stepped it. Complete buckets are gathered from
    the last of the plan to its first, about the order in which a forward reads them. So ranks whose optimizers step in
    another order start the same gathers in the same order.

    Args:
        optimizers: All that were sharded together.
    """

    def __init__(
        self, optimizers: Sequence[SteppedPieces], reader: ParameterReader, gradients: ShardedGradients
    ) -> None:
        self._optimizers = optimizers
        self._reader = reader
        self._gradients = gradients
        self._due: list[SteppedPieces] = []  # those that have not stepped since the first one did
        self._stepping: SteppedPieces | None = None  # its step has begun and not ended
        self._stepped: set[int] = set()  # numbers of the parameters that this joint step may have changed
        self._to_gather: list[ShardedBucket] = []  # in plan order; the last one is next
        self._complete: set[ShardedBucket] = set()
        self._ended: list[streams.Event] = []  # the steps so far, which may have run on other streams
        reader.refuse_half_a_step = self.refuse_half_a_step
        reader.guards_steps = len(optimizers) > 1

    def begins(self, optimizer: SteppedPieces) -> None:
        """An optimizer is about to step its pieces.

        Raises:
            ReplicationError: Another step has raised, or this optimizer has stepped and others have not.
        """
        streams.refuse_capture(optimizer.buckets[0].flat.device, "a step of a sharded optimizer")
        is_first = self._stepping is not None or optimizer not in self._due
        if is_first:
            self.refuse_half_a_step()
        self._gradients.before_reading("optimizer.step()")  # it may raise, and then no step has begun
        if is_first:
            self._reader.wait()  # for the step before, if no forward came between
            for bucket in self._reader.buckets:
                bucket.take_edits()
            self._due = list(self._optimizers)
            self._to_gather, self._complete = list(self._reader.buckets), set()
            self._stepped, self._ended = set(), []
        with_gradient = {piece.index for piece in optimizer.pieces if piece.stepped.grad is not None}
        self._stepped |= (self._gradients.reduced & optimizer.indices) | with_gradient
        self._prepare(optimizer)
        self._stepping = optimizer
        self._reader.step_begins(is_first)

    def _prepare(self, optimizer: SteppedPieces) -> None:
        for bucket in optimizer.buckets:
            if bucket.state is State.WHOLE:  # else another optimizer has stepped in it already
                bucket.on(Event.STEP_BEGINS)

    def bucket_is_stepped(self, bucket: ShardedBucket, optimizer: SteppedPieces) -> None:
        """An optimizer has stepped its pieces in a bucket; gather what is complete and has its turn."""
        self._reader.raise_guard()  # the step itself may have read parameters
        if any(other is not optimizer and bucket in other.buckets for other in self._due):
            return
        self._complete.add(bucket)
        while self._to_gather and self._to_gather[-1] in self._complete:
            self._gather(self._to_gather.pop())

    def _gather(self, bucket: ShardedBucket) -> None:
        for event in self._ended:
            event.wait()
        try:
            with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_gather"):
                records = self._reader.records
                transfer = records.launch_begins("gather", bucket.spec.index, bucket.spec.num_bytes)
                records.launch_ends(transfer, bucket.gather(self._stepped))
        except RuntimeError as error:
            raise self._reader.failed(error) from error

    def ends(self, optimizer: SteppedPieces) -> None:
        """An optimizer has stepped all its pieces."""
        self._due.remove(optimizer)
        self._stepping = None
        if not self._due:
            self._complete = set()  # holds no bucket between steps: a change of the plan frees them
        else:
            self._ended.append(streams.record(optimizer.buckets[0].flat.device))
        optimizer.note_step()
        self._reader.step_ends(is_last=not self._due)

    def refuse_missing_steps(self) -> None:
        """Raise a ReplicationError if some of the optimizers have stepped and others can still step."""
        if self._stepping is None:
            self.refuse_half_a_step()

    def refuse_half_a_step(self) -> None:
        """Raise a ReplicationError if a step has raised, or if some optimizers have stepped and others have not."""
        if self._stepping is not None:
            raise ReplicationError(
                f"{this_rank()}: {self._stepping.name}.step() has raised before all parameters were stepped, so the"
                " ranks are not alike any more; start again from a checkpoint, with a model and an optimizer made anew"
            )
        self.end_left_out()
        if self._due:
            names = ", ".join(optimizer.name for optimizer in self._due)
            raise ReplicationError(
                f"{this_rank()}: half a step: of the {len(self._optimizers)} optimizers that were sharded together,"
                f" {names} has not stepped since the others did. Call step() of each of them, one after the other,"
                " before parameters are read again by a forward or otherwise"
            )

    def end_left_out(self) -> None:
        """Count optimizers whose steps a GradScaler leaves out as stepped, which may complete buckets."""
        for optimizer in [each for each in self._due if each.is_left_out()]:
            self._prepare(optimizer)
            for bucket in optimizer.buckets:
                self.bucket_is_stepped(bucket, optimizer)
            self.ends(optimizer)
