"""The parameters of a model whose optimizers are sharded: from an optimizer's step to the next read."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.errors import ReductionError, ReplicationError, this_rank
from ddp_compile.runtime.comm import error_messages, streams
from ddp_compile.runtime.comm.step_records import NO_RECORDS, NoRecords
from ddp_compile.runtime.sharded.bucket import ShardedBucket
from ddp_compile.runtime.sharded.gradients import ShardedGradients
from ddp_compile.runtime.sharded.guard import ParameterGuard
from ddp_compile.runtime.sharded.transfers import ShardTransfers

if TYPE_CHECKING:
    from ddp_compile.runtime.sharded.optimizer import SteppedPieces


class ShardedParameters:
    """Gathers each bucket after it has been stepped, and waits for the gathers before parameters are read.

    In a joint step each optimizer steps once. It begins with the first of them and ends with the last. A bucket is
    stepped when every optimizer with a parameter in it has stepped it. Stepped buckets are gathered from the last of
    the plan to its first, about the order in which a forward reads them. So ranks whose optimizers step in different
    orders still start the same gathers in the same order.

    A forward that is one compiled graph waits for each bucket at its first use. Every other reader waits for all of
    them. While a joint step is incomplete, reads raise.

    Args:
        parameters: All reduced parameters.
        optimizers: All that were sharded together.
        overlaps: Gathers may be under way when a step returns.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        optimizers: Sequence[SteppedPieces],
        gradients: ShardedGradients,
        transfers: ShardTransfers,
        overlaps: bool,
    ) -> None:
        self.gradients = gradients
        self.transfers = transfers
        self.records: NoRecords = NO_RECORDS  #: of gathers and waits for them
        self.buckets: Sequence[ShardedBucket] = ()  #: in plan order; none before the end of the first backward
        self.has_overlapped = False  #: whether the last forward waited for each bucket at its first use
        self._optimizers = optimizers
        self._overlaps = overlaps
        #: Cleared by the first forward of which Python runs a part: Python could read any parameter.
        self._overlaps_forward = overlaps
        self._guard = ParameterGuard(parameters, self._await_all)
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

    # A step.

    def step_begins(self, optimizer: SteppedPieces) -> None:
        """An optimizer is about to step its pieces.

        Raises:
            ReplicationError: Another step has raised, or this optimizer has stepped and others have not.
        """
        streams.refuse_capture(optimizer.buckets[0].flat.device, "a step of a sharded optimizer")
        is_first = self._stepping is not None or optimizer not in self._due
        if is_first:
            self.refuse_half_a_step()
        self.gradients.before_reading("optimizer.step()")  # it may raise, and then no step has begun
        if is_first:
            self.wait()  # for the step before, if no forward came between
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
        try:
            with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_gather"):
                transfer = self.records.launch_begins("gather", bucket.spec.index, bucket.spec.num_bytes)
                self.records.launch_ends(transfer, bucket.gather(self._changed))
        except RuntimeError as error:
            raise self._gather_failed(error) from error

    def step_ends(self, optimizer: SteppedPieces) -> None:
        """An optimizer has stepped all its pieces. After the last one, all buckets are being gathered."""
        self._due.remove(optimizer)
        self._stepping, self._stepping_thread = None, 0
        if self._due:
            self._ended.append(streams.record(optimizer.buckets[0].flat.device))
        elif not self._overlaps:
            self.wait()

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
        self.end_left_out()
        if self._due:
            names = ", ".join(optimizer.name for optimizer in self._due)
            raise ReplicationError(
                f"{this_rank()}: half a step: of the {len(self._optimizers)} optimizers that were sharded together,"
                f" {names} has not stepped since the others did. Call step() of each of them, one after the other,"
                " before a forward or anything else reads parameters"
            )

    def end_left_out(self) -> None:
        """Count optimizers whose steps a GradScaler leaves out as stepped, which may start gathers."""
        for optimizer in [each for each in self._due if each.is_left_out()]:
            for bucket in optimizer.buckets:
                self.bucket_is_stepped(bucket, optimizer)
            self.step_ends(optimizer)

    # Reads.

    def wait(self, indices: Sequence[int] | None = None) -> None:
        """Return when parameters are complete: those of these numbers, or all."""
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
        try:
            with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_gather_wait"):
                transfer = self.records.wait_begins("gather", bucket.spec.index)
                bucket.wait()
                self.records.wait_ends(transfer)
        except RuntimeError as error:
            self._raise_guard()  # a forward may have taken it down
            raise self._gather_failed(error) from error

    def _raise_guard(self) -> None:
        if self._is_guarded:
            self._guard.raise_up()

    def _gather_failed(self, error: RuntimeError) -> ReductionError:
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
            self.wait()

    def after_forward(self, as_one_graph: bool, has_waited: bool) -> None:
        """See `Sharding.forward_ends`."""
        self._end_watching()
        if not (as_one_graph or has_waited):
            self._overlaps_forward = False
        self.has_overlapped = self._overlaps_forward and not has_waited
        self.wait()

    def _watch_compilations(self) -> None:
        """A compilation means that this forward runs another graph than the last one, perhaps with graph breaks."""
        self._end_watching()
        alive = weakref.ref(self)  # torch keeps the callbacks if a forward never ends

        def begins(_number: str) -> None:
            if (parameters := alive()) is not None:
                parameters.wait()

        self._stop_watching = torch_internals.watch_compilations(begins, lambda: None)

    def _end_watching(self) -> None:
        if self._stop_watching is not None:
            self._stop_watching()
            self._stop_watching = None
