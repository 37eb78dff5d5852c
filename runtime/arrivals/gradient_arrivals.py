"""Counts the gradients of one iteration as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddp_compile.runtime.arrivals.parameter_hooks import ParameterHooks
from ddp_compile.runtime.arrivals.policies import AllRequired
from ddp_compile.runtime.arrivals.undefined_gradients import UndefinedGradients
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.comm import error_messages


class GradientArrivals:
    """Says of each bucket when its gradients are there, and nothing more will change them.

    Args:
        bucket_set: The buckets.
        hooks: Say when all hooks on the parameter that came last have run.
        policy: Whether a gradient counts.
        undefined: Knows which gradients are.
        complete: Called with a bucket that is ready.
        names: Of the parameters, by their numbers.
        rank: This rank, for messages.
    """

    def __init__(
        self,
        bucket_set: BucketSet,
        hooks: ParameterHooks,
        policy: AllRequired,
        undefined: UndefinedGradients,
        complete: Callable[[Bucket], None],
        names: Sequence[str],
        rank: int,
    ) -> None:
        self._bucket_set = bucket_set
        self._hooks = hooks
        self._policy = policy
        self._undefined = undefined
        self._complete = complete
        self._names = names
        self._rank = rank
        self._with_running_hooks: list[Bucket] = []  # whose last gradient is there, and may still be changed

    def arrive(self, index: int) -> None:
        """A parameter has arrived; other hooks on it and on its node may be about to change its gradient.

        Raises:
            GradientArrivalError: It has arrived before.
        """
        is_undefined = self.note(index)
        self._bucket_set.note_arrival(index)
        bucket = self._bucket_set.of_parameter[index]
        bucket.note_stream()
        if not self._policy.counts(bucket, index, is_undefined):
            return
        if index not in bucket.iteration.pending:
            raise error_messages.arrived_twice(self._names[index])
        if bucket.arrive(index):
            self._hooks.note_last(index)
            self._hooks.notify_behind(index)
            self._with_running_hooks.append(bucket)

    def note(self, index: int) -> bool:
        """Take note of what a parameter holds on arrival; returns whether its gradient is undefined."""
        is_undefined = self._undefined.arrive(index)
        if not is_undefined:
            self._policy.note(index)
        return is_undefined

    def hooks_have_run(self) -> None:
        """All hooks on the parameter that has arrived last have run: the bucket that it completes is ready."""
        while self._with_running_hooks:
            self._complete(self._with_running_hooks.pop(0))

    def begin_iteration(self) -> None:
        """What the last iteration has left over belongs to nobody."""
        self._with_running_hooks = []
