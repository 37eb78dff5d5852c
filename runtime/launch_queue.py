"""From the last gradient of a bucket to its result: flattened, launched in plan order, waited for, handed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.errors import ReductionError
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.arrivals.policies import AllRequired
from ddp_compile.runtime.arrivals.undefined_gradients import UndefinedGradients
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.bucket_iteration import BucketState
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm
from ddp_compile.runtime.comm import error_messages, streams
from ddp_compile.runtime.desync.monitor import DesyncMonitor


class LaunchQueue:
    """The buckets of one plan on their way out.

    Args:
        bucket_set: The buckets.
        process_group: The ranks to average over.
        monitor: What the ranks tell each other about it.
        algorithm: How a bucket is reduced; another one may take its place between two iterations.
        policy: Which gradients an iteration waits for.
        undefined: Which parameters have arrived without a gradient.

    Every rank launches the same buckets in the same order, whatever order they become ready in: a collective finds its
    counterpart on another rank by its place in the sequence alone.
    """

    def __init__(
        self,
        bucket_set: BucketSet,
        process_group: dist.ProcessGroup,
        monitor: DesyncMonitor,
        algorithm: CommAlgorithm,
        policy: AllRequired,
        undefined: UndefinedGradients,
    ) -> None:
        self._set = bucket_set
        self.algorithm = algorithm
        self._policy = policy
        self._undefined = undefined
        #: Called when no bucket of the iteration is left to launch.
        self.on_all_launched: Callable[[], None] = _nothing
        self._monitor = monitor
        self._rank = process_group.rank()
        self.world_size = process_group.size()
        self.divisor = self.world_size  #: what gradients are divided by
        self._num_launched = 0  # or passed over
        self.has_launched = False  #: whether a bucket has been launched in this iteration
        self.is_exchange = False  #: whether the ranks come together in it although no bucket is launched
        self.is_whole = True  #: whether no bucket has been passed over in it, for the next iteration
        self.is_shadow = False  #: whether this rank has no input left, and contributes zeros (``Join``)

    @property
    def sends(self) -> bool:
        """Whether anything is reduced."""
        algorithm = self.algorithm
        return algorithm.sends_gradients and (self.world_size > 1 or algorithm.traits.on_one_rank)

    @property
    def _plan(self) -> BucketPlan:
        assert self._set.plan is not None
        return self._set.plan

    @property
    def _scale(self) -> float:
        """What gradients are multiplied by on their way into the flat buffer."""
        return 1.0 / self.divisor if self.algorithm.traits.prescale else 1.0

    @property
    def all_launched(self) -> bool:
        """Whether every bucket of the iteration has been launched, or will not be in it."""
        return self._num_launched == len(self._set.buckets)

    @property
    def not_launched(self) -> Sequence[Bucket]:
        """The buckets that have not been launched, in plan order."""
        return self._set.buckets[self._num_launched :]

    @property
    def _last_bucket(self) -> Bucket | None:
        """The one that is launched last."""
        return next((bucket for bucket in reversed(self._set.buckets) if not bucket.iteration.is_left_out), None)

    @property
    def left_out(self) -> set[int]:
        """The parameters whose buckets are not sent in this iteration, since no rank uses them."""
        buckets = [bucket for bucket in self._set.buckets if bucket.iteration.is_left_out]
        return {index for bucket in buckets for index in bucket.param_indices}

    @property
    def missing(self) -> list[int]:
        """The parameters that buckets wait for, in plan order."""
        return [
            index for bucket in self._set.buckets if bucket.is_pending for index in sorted(bucket.iteration.pending)
        ]

    # A bucket becomes ready.

    def leave_out_unused(self) -> None:
        """When an iteration begins: pass over the buckets that no rank uses."""
        for bucket in self._set.buckets:
            if bucket.is_pending and self._policy.leaves_out(bucket):
                bucket.leave_out()

    def complete(self, bucket: Bucket) -> None:
        """A bucket is ready with what its parameters hold, and zeros for those that hold nothing."""
        bucket.iteration.pending.clear()
        bucket.await_accumulation()
        gradients = bucket.contributions(self.sends, self._undefined.verify)
        if bucket.may_launch_early and self.algorithm.traits.replayable:
            # It may have been launched early, and too early, on another rank. What is sent will be written over, or is
            # not ``.grad`` any more. Not the gradients themselves, which would look as if somebody else held them.
            bucket.iteration.own = [g.clone() if bucket.holds(g) else g.detach() for g in gradients]
        self._make_ready(bucket, gradients)
        del gradients  # whoever else holds one is found by the number of references
        if self.sends and any(b.is_pending for b in self.not_launched):
            # The backward goes on, and can use the memory. At its end everything is pointed at views anyway.
            bucket.point_gradients_at_views(bucket.iteration.unused)

    def complete_with(self, bucket: Bucket, gradients: Sequence[Tensor]) -> None:
        """A bucket is ready with gradients that its parameters do not hold yet."""
        bucket.iteration.unused.clear()
        for index in bucket.param_indices:
            self._policy.note(index)
        self._make_ready(bucket, gradients)

    def do_without(self, absent: Iterable[int]) -> None:
        """Let buckets no longer wait for these parameters, which contribute what they hold, or zeros."""
        for index in sorted(absent):
            bucket = self._set.of_parameter[index]
            if bucket.is_pending and index in bucket.iteration.pending:
                bucket.iteration.unused.add(index)
        for index in sorted(absent):
            bucket = self._set.of_parameter[index]
            if bucket.is_pending and index in bucket.iteration.pending and bucket.arrive(index):
                self.complete(bucket)

    def complete_without_the_missing(self, after_forward: bool) -> bool:
        """At the end of a backward, complete the buckets that may be launched without the gradients they miss.

        Args:
            after_forward: Whether a synchronised forward has come before the backward.

        Returns:
            Whether the iteration is over: False if it has to wait for another backward.
        """
        absent = self._policy.absent_at_the_end(frozenset(self.missing))
        if absent is not None:
            self.do_without(absent)
            for bucket in self._set.buckets:
                if bucket.is_pending:  # what came to it was not counted
                    self.complete(bucket)
            return True
        if after_forward:
            return False
        self._complete_with_means()
        return True

    def _complete_with_means(self) -> None:
        """Complete the iteration of a backward without a forward before it, of a regulariser for example.

        Parameters that it did not reach hold the mean of the iteration before, and the mean of means is the mean. A
        bucket with a parameter that holds none stays as it is: its gradients will be reduced in the next iteration.
        """
        for bucket in self.not_launched:
            is_pending = bucket.is_pending
            if is_pending and all(gradient is not None for gradient in bucket.gradients()):
                self.complete(bucket)
            self._launch_ready(skip=bucket.is_pending)

    def _make_ready(self, bucket: Bucket, gradients: Sequence[Tensor]) -> None:
        """Flatten a bucket, and launch what is ready then."""
        if self.sends:
            with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_ready"):
                bucket.flatten(gradients, self._scale)
        bucket.iteration.state = BucketState.READY
        self._launch_ready()
        if self.sends and bucket.state is BucketState.READY:
            # An earlier bucket is not ready yet. When it is, this one is launched as well, maybe on another stream.
            bucket.iteration.flattened_at = streams.record(bucket.flat.device)

    # It is launched, when it is its turn.

    def _launch_ready(self, skip: bool = False) -> None:
        """Launch what is ready, in plan order.

        Args:
            skip: The next bucket will not be launched in this iteration; pass over it first.
        """
        before = self._num_launched
        if skip:
            self._num_launched += 1
            self.is_whole = False
        try:
            while not self.all_launched and (bucket := self.not_launched[0]).state is BucketState.READY:
                if self.sends and not bucket.iteration.is_left_out:
                    self._launch(bucket, is_last=bucket is self._last_bucket)
                bucket.iteration.state = BucketState.LAUNCHED
                self._num_launched += 1
        except ReductionError as error:  # of an algorithm, which may wait for the bucket before
            raise self._monitor.report_failure(error) from error.__cause__
        except RuntimeError as error:
            failure = error_messages.reduction_failed(self.not_launched[0].describe(), error)
            raise self._monitor.report_failure(failure) from error
        if self.all_launched and self._num_launched > before:
            self.is_exchange = self.is_whole and self.world_size > 1 and self.algorithm.meets_others
            if self.is_exchange:
                self._monitor.last_bucket_is_launched(self._plan, self.algorithm.name, is_shared=False)
            self.on_all_launched()

    def _launch(self, bucket: Bucket, is_last: bool) -> None:
        self.has_launched = True
        if is_last:
            self._monitor.last_bucket_is_launched(self._plan, self.algorithm.name, self.algorithm.shares_process_group)
        with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_launch"):
            if bucket.iteration.flattened_at is not None:
                bucket.iteration.flattened_at.wait()
            self._begin_reduction(bucket, is_last)

    def _begin_reduction(self, bucket: Bucket, is_last: bool) -> None:
        work: Any = self.algorithm.launch(bucket, is_last)  # a user's algorithm may return anything
        if not callable(getattr(work, "wait", None)):
            raise error_messages.nothing_to_wait_for(self.algorithm.name, bucket.describe(), work)
        bucket.reduction_begins(work)

    def launch_again(self, bucket: Bucket, gradients: Sequence[Tensor]) -> None:
        """Reduce a bucket that has been launched in this iteration once more; every rank does so, in the same order.

        Args:
            bucket: It has been waited for. The algorithm is replayable.
            gradients: What to send in place of what was sent; a shadow sends zeros.
        """
        if self.is_shadow:
            bucket.fill_with_nothing()
        else:
            bucket.flatten(gradients, self._scale)
        self._begin_reduction(bucket, is_last=False)

    def launch_shadows(self) -> None:
        """Launch every bucket with zeros: this rank has no input left, and the others train on."""
        self.is_shadow = True
        self.leave_out_unused()
        for bucket in [bucket for bucket in self._set.buckets if bucket.is_pending]:
            bucket.fill_with_nothing()
            bucket.iteration.pending.clear()
            bucket.iteration.state = BucketState.READY
        self._launch_ready()

    # It is reduced.

    def drain(self) -> None:
        """Return when nothing that was launched will start another collective; before anything else is sent.

        Raises:
            ReductionError: What was launched has failed.
        """
        try:
            self.algorithm.drain()
        except ReductionError as error:
            raise self._monitor.report_failure(error) from error.__cause__

    def wait(self) -> None:
        """Wait for what has been launched.

        Raises:
            ReductionError: A reduction failed or timed out.
        """
        self.drain()
        under_way = [bucket for bucket in self._set.buckets if bucket.is_under_way]
        if under_way:
            self._monitor.buckets_are_awaited()
        for bucket in under_way:
            try:
                with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_wait"):
                    bucket.wait()
            except ReductionError as error:  # the algorithm's own
                raise self._monitor.report_failure(error, f", bucket {bucket.spec.index}") from error.__cause__
            except RuntimeError as error:
                failure = error_messages.reduction_failed(bucket.describe(), error)
                raise self._monitor.report_failure(failure, f", bucket {bucket.spec.index}") from error

    def finish(self, untouched: Set[int]) -> None:
        """Wait for what has been launched, and let every ``.grad`` be the reduced gradient.

        Args:
            untouched: Numbers of parameters that got no gradient on any rank: theirs stay what they were.

        Raises:
            ReductionError: A reduction failed or timed out.
            RanksDifferError: The ranks have found that they are out of step.
        """
        launched = [bucket for bucket in self._set.buckets if bucket.iteration.work is not None]
        for bucket in launched:
            bucket.point_gradients_at_views(untouched)
        self.wait()
        self._monitor.compare()
        self.algorithm.sharding.hand_over(self._set.buckets, launched, untouched)
        if not self.sends:  # what DistributedDataParallel makes of the mean of one rank
            undefined = self._undefined.indices - untouched
            for index in undefined:
                self._set.of_parameter[index].fill_with_zeros(undefined)

    def begin_iteration(self) -> None:
        """Forget the iteration that has ended."""
        for bucket in self._set.buckets:
            bucket.begin_iteration()
        self._num_launched = 0
        self.has_launched = False
        self.is_exchange = False
        self.is_whole = True
        self.is_shadow = False


def _nothing() -> None:
    return None
