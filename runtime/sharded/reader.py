"""Waits for the parameters that a step has changed, before they are read."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence

from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.errors import ReductionError, ReplicationError, this_rank
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.step_records import NO_RECORDS, NoRecords
from ddp_compile.runtime.sharded.bucket import ShardedBucket
from ddp_compile.runtime.sharded.guard import ParameterGuard
from ddp_compile.runtime.sharded.state import State


class ParameterReader:
    """Waits for parameters before they are read.

    A forward that is one compiled graph waits for each bucket at its first use; every other reader waits for all of
    them. ``overlaps`` is the user's setting.
    """

    def __init__(self, parameters: Sequence[Parameter], overlaps: bool) -> None:
        self._overlaps = overlaps
        self._guard = ParameterGuard(parameters, self._complete)
        self.records: NoRecords = NO_RECORDS  #: of gathers and waits for them
        self.buckets: Sequence[ShardedBucket] = ()  #: in plan order
        #: Cleared by the first forward of which Python runs a part: Python could read any parameter.
        self._overlaps_forward = overlaps
        self.has_overlapped = False  #: whether the last forward waited for each bucket at its first use
        self._process = os.getpid()
        self._num_steps = 0
        self._stepping_thread = 0
        # Both are set by `JointStep`.
        self.refuse_half_a_step: Callable[[], None]  #: raises if a step has begun and not ended
        self.guards_steps = False  #: whether there are several optimizers, between whose steps reads are refused
        self._stop_watching: Callable[[], None] | None = None

    def step_begins(self, is_first: bool) -> None:
        """An optimizer is about to step; before the first one, the parameters of the step before are complete."""
        self._stepping_thread = threading.get_ident()
        self._num_steps += is_first
        self.raise_guard()

    def step_ends(self, is_last: bool) -> None:
        """An optimizer has stepped; if it is the last one, all buckets are being gathered."""
        self._stepping_thread = 0
        if is_last and not self._overlaps:
            self.wait()

    def raise_guard(self) -> None:
        """From now on, reading a parameter waits."""
        if self._overlaps or self.guards_steps:
            self._guard.raise_up()

    def wait(self, indices: Sequence[int] | None = None) -> None:
        """See `Sharding.await_parameters`."""
        if indices is None:
            self._complete()
            self._guard.take_down()
        else:
            wanted = set(indices)
            for bucket in reversed(self.buckets):
                if not wanted.isdisjoint(bucket.param_indices):
                    self._wait_for(bucket)

    def _complete(self) -> None:
        # Other threads may read while this one steps, and so may the step's own code.
        stepping = self._stepping_thread
        if not stepping or (stepping == threading.get_ident() and not torch_internals.inside_optimizer_step()):
            self.refuse_half_a_step()
        for bucket in reversed(self.buckets):
            self._wait_for(bucket)

    def _wait_for(self, bucket: ShardedBucket) -> None:
        if bucket.state is not State.GATHERING:
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
            self.raise_guard()  # a forward may have taken it down
            raise self.failed(error) from error

    def failed(self, error: RuntimeError) -> ReductionError:
        """What to raise from the error of a gather."""
        return error_messages.exchange_failed(f"gather of parameters after step {self._num_steps}", error)

    def before_forward(self) -> None:
        """Leave gathers under way only if nothing but one compiled graph is going to read the parameters."""
        if not torch_internals.inside_optimizer_step():
            self.refuse_half_a_step()
        if self._overlaps_forward:
            self._guard.take_down()
            self._watch_compilations()
        else:
            self.wait()

    def _watch_compilations(self) -> None:
        """A compilation means that this forward runs another graph than the last one, perhaps with graph breaks."""
        self._end_watching()
        alive = weakref.ref(self)  # torch keeps the callbacks if a forward never ends

        def begins(_number: str) -> None:
            if (reader := alive()) is not None:
                reader.wait()

        self._stop_watching = torch_internals.watch_compilations(begins, lambda: None)

    def _end_watching(self) -> None:
        if self._stop_watching is not None:
            self._stop_watching()
            self._stop_watching = None

    def after_forward(self, as_one_graph: bool, has_waited: bool) -> None:
        """See `Sharding.forward_ends`."""
        self._end_watching()
        if not (as_one_graph or has_waited):
            self._overlaps_forward = False
        self.has_overlapped = self._overlaps_forward and not has_waited
        self.wait()
