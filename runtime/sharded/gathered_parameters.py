"""Parameters from the step that changes them to whoever reads them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.errors import ReductionError, ReplicationError, this_rank
from ddp_compile.runtime.comm import streams
from ddp_compile.runtime.sharded.guarded_parameters import ParameterGuard
from ddp_compile.runtime.sharded.sharded_bucket import ShardedBucket


class GatheredParameters:
    """Knows whether parameters are being stepped, gathered or complete, and waits for them before they are read.

    A forward that is one compiled graph waits for each bucket where it reads it, anybody else for all of them, see Note
    [Guarded parameters].

    Args:
        parameters: Those that are reduced.
        rank: This rank.
        failed: What to raise of the error of a gather.
    """

    def __init__(
        self, parameters: Sequence[Parameter], rank: int, failed: Callable[[RuntimeError], ReductionError]
    ) -> None:
        self._rank = rank
        self._failed = failed
        self._device = parameters[0].device
        self._guard = ParameterGuard(parameters, self._complete_for_everybody, self._is_lost)
        self.buckets: Sequence[ShardedBucket] = ()  #: in plan order
        self.overlaps_forward = False  #: whether the last forward was one compiled graph
        self._is_stepping = False
        self._stepping_thread = 0
        self._has_failed = False

    # They are stepped.

    def step_begins(self) -> None:
        """From now on, whoever reads one waits, or is told that the step was interrupted."""
        self._is_stepping, self._stepping_thread = True, threading.get_ident()
        self._guard.raise_up()

    def gather_begins(self) -> None:
        """A bucket is about to be gathered."""
        self._guard.raise_up()

    def step_ends(self) -> None:
        """All buckets are being gathered."""
        self._is_stepping, self._stepping_thread = False, 0

    def refuse_half_a_step(self) -> None:
        """Raise where a step has begun and not ended."""
        if self._is_stepping:
            raise ReplicationError(
                f"{this_rank()}: optimizer.step() has raised before all parameters were stepped, so the ranks are"
                " not alike any more; start again from a checkpoint, with a model and an optimizer made anew"
            )

    def _was_step_interrupted(self) -> bool:
        # Threads beside the one that steps may read while it does.
        is_same_thread = self._stepping_thread == threading.get_ident()
        return self._is_stepping and is_same_thread and not torch_internals.inside_optimizer_step()

    def _is_lost(self) -> bool:
        return self._has_failed or self._was_step_interrupted()

    # They are read.

    def wait(self, indices: Sequence[int] | None = None) -> None:
        """See `CommAlgorithm.await_parameters`."""
        if indices is None:
            self._complete()
            self._guard.take_down()
        else:
            wanted = set(indices)
            for bucket in reversed(self.buckets):
                if not wanted.isdisjoint(bucket.param_indices):
                    self._wait_for(bucket)

    def _complete(self) -> None:
        if self._was_step_interrupted():
            self.refuse_half_a_step()
        for bucket in reversed(self.buckets):
            self._wait_for(bucket)

    def _complete_for_everybody(self) -> None:
        """For readers other than forwards: the host waits, since the stream on which they will read is not known."""
        self._complete()
        streams.synchronize(self._device)

    def _wait_for(self, bucket: ShardedBucket) -> None:
        if not bucket.is_gathering:
            bucket.wait()
            return
        try:
            with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_gather_wait"):
                bucket.wait()
        except RuntimeError as error:
            # Later reads raise the same exception, after the forward too.
            self._guard.raise_up()
            self._has_failed = True
            raise self._failed(error) from error

    _stop_watching: Callable[[], Any] = staticmethod(lambda: None)

    def before_forward(self) -> None:
        """Leave gathers under way only where nothing but one compiled graph will read the parameters.

        Otherwise Python code of the forward might. A compilation is the sign that another graph is to come.
        """
        if not torch_internals.inside_optimizer_step():
            self.refuse_half_a_step()
        if not self.overlaps_forward:
            self.wait()
            return
        self._guard.take_down()
        self._stop_watching()
        alive = weakref.ref(self)  # torch keeps what watches, if a forward never ends

        def begins(_number: str) -> None:
            if (gathered := alive()) is not None:
                gathered.wait()

        self._stop_watching = torch_internals.watch_compilations(begins, lambda: None)

    def after_forward(self, as_one_graph: bool) -> None:
        """See `CommAlgorithm.after_forward`."""
        self._stop_watching()
        self.overlaps_forward = as_one_graph
        self.wait()
