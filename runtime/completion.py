"""When a bucket is complete: all its gradients have come, or those that it misses are done without."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence, Set

from torch import Tensor

from ddp_compile.runtime.bucket_buffer import BucketBuffer, BucketState
from ddp_compile.runtime.bucket_set import BucketSet
from ddp_compile.runtime.early_buckets import EarlyBuckets
from ddp_compile.runtime.launch_queue import LaunchQueue
from ddp_compile.runtime.optional_gradients import OptionalGradients
from ddp_compile.runtime.undefined_gradients import UndefinedGradients


class Completion:
    """Completes buckets, and lets them leave when it is their turn.

    Args:
        bucket_set: The buckets.
        queue: Sends them in plan order.
        optional: Which gradients may stay away; None where every one has to come.
        early: Which buckets leave inside a compiled backward; None where none does.
        undefined: Which parameters have arrived without a gradient.
        on_all_left: Called when no bucket of the round is left to leave.
    """

    def __init__(
        self,
        bucket_set: BucketSet,
        queue: LaunchQueue,
        optional: OptionalGradients | None,
        early: EarlyBuckets | None,
        undefined: UndefinedGradients,
        on_all_left: weakref.ReferenceType[Callable[[], None]],
    ) -> None:
        self._on_all_left = on_all_left
        self._undefined = undefined
        self._set = bucket_set
        self._queue = queue
        self._optional = optional
        self._early = early

    def complete(self, bucket: BucketBuffer) -> None:
        """Complete a bucket with what its parameters hold, and zeros for those that hold nothing."""
        bucket.missing.clear()
        gradients = bucket.contributions(self._unused(), self._queue.sends, self._undefined)
        if self._early is not None and self._queue.algorithm.traits.replayable:
            self._early.keep(bucket, gradients)
        self._queue.complete(bucket, gradients)
        del gradients  # whoever else holds one is found by the number of references
        self._launch_ready()
        if self._queue.sends and any(b.state is BucketState.COLLECTING for b in self._queue.still_here):
            # The backward goes on, and can use the memory. At its end everything is pointed at views anyway.
            bucket.point_gradients_at_views(self._unused())

    def complete_with(self, bucket: BucketBuffer, gradients: Sequence[Tensor]) -> None:
        """Complete a bucket with gradients that its parameters do not hold yet."""
        bucket.missing.clear()
        if self._optional is not None:
            self._optional.unused.difference_update(bucket.members)
            for index in bucket.members:
                self._optional.note(index)
        self._queue.complete(bucket, gradients)
        self._launch_ready()

    def do_without(self, absent: Iterable[int]) -> None:
        """Let buckets no longer wait for these parameters, which contribute what they hold, or zeros."""
        assert self._optional is not None
        waiting = sorted(index for index in absent if index in self._set.of_parameter[index].missing)
        self._optional.unused.update(waiting)
        for index in waiting:
            if self._set.of_parameter[index].arrive(index):
                self.complete(self._set.of_parameter[index])

    def complete_without_the_missing(self, after_forward: bool) -> bool:
        """At the end of a backward, complete the buckets that may leave without the gradients they miss.

        Args:
            after_forward: Whether a synchronised forward has come before the backward.

        Returns:
            Whether the round is over: False if it has to wait for another backward.
        """
        if self._optional is not None:
            missing = {index for bucket in self._set.buckets for index in bucket.missing}
            absent = self._optional.absent_at_the_end(missing)
            if absent is not None:
                self.do_without(absent)
                for bucket in self._set.buckets:
                    if bucket.state is BucketState.COLLECTING:  # what came to it was not counted
                        self.complete(bucket)
                return True
        if after_forward:
            return False
        self._complete_with_means()
        return True

    def _complete_with_means(self) -> None:
        """Complete the round of a backward without a forward before it, of a regulariser for example.

        Parameters that it did not reach hold the mean of the round before, and the mean of means is the mean. A bucket
        with a parameter that holds none stays as it is: its gradients will be reduced in the next round.
        """
        for bucket in self._queue.still_here:
            if bucket.missing and all(parameter.grad is not None for parameter in bucket.parameters):
                self.complete(bucket)
            self._launch_ready(skip=bucket.state is BucketState.COLLECTING)

    def _launch_ready(self, skip: bool = False) -> None:
        if self._queue.launch_ready(skip) and (all_have_left := self._on_all_left()) is not None:
            all_have_left()

    def _unused(self) -> Set[int]:
        return frozenset() if self._optional is None else self._optional.unused
