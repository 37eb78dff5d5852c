"""From the last gradient of a bucket to its result: flatten, launch in plan order, wait, hand over."""

from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from typing import Any

from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.errors import ReductionError
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.arrivals.policies import AllRequired
from ddp_compile.runtime.arrivals.undefined_gradients import UndefinedGradients
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm
from ddp_compile.runtime.buckets.gradients import fill_with_zeros
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.exchange import Exchange
from ddp_compile.runtime.comm.step_records import NO_RECORDS, NoRecords
from ddp_compile.runtime.desync.monitor import DesyncMonitor
from ddp_compile.runtime.normalizer import Normalizer


class LaunchQueue:
    """Launches the buckets of one module, and waits for them.

    Every rank launches the same buckets in the same order, in whatever order they become ready, since collectives of
    different ranks pair up by order alone. The algorithm may be replaced between two iterations.
    """

    def __init__(
        self,
        bucket_set: BucketSet,
        monitor: DesyncMonitor,
        algorithm: CommAlgorithm,
        policy: AllRequired,
        undefined: UndefinedGradients,
        normalizer: Normalizer,
    ) -> None:
        self._set = bucket_set
        self.algorithm = algorithm
        self._policy = policy
        self._undefined = undefined
        self._normalizer = normalizer
        #: Called when no bucket of the iteration is left to launch.
        self.on_all_launched: Callable[[], object]
        self.records: NoRecords = NO_RECORDS  #: of the model's steps
        self._monitor = monitor
        self.world_size = bucket_set.process_group.size()
        self.divisor = self.world_size  #: of the sum of all ranks' gradients

    @property
    def sends(self) -> bool:
        """Whether buckets are reduced in this iteration."""
        algorithm = self.algorithm
        return algorithm.sends_gradients and (self.world_size > 1 or algorithm.traits.on_one_rank)

    @property
    def _plan(self) -> BucketPlan:
        assert self._set.plan is not None
        return self._set.plan

    @property
    def _scale(self) -> float | Tensor:
        """Factor of the gradients on their way into the flat buffer."""
        if self.algorithm.traits.prescale:
            return self._normalizer.factor(self.divisor, 1, self.records)
        # It divides by the number of all ranks, inside Join too, as DistributedDataParallel leaves it to comm hooks.
        return self._normalizer.factor(self.world_size, self.world_size, self.records)

    @property
    def all_launched(self) -> bool:
        """Whether every bucket of the iteration has been launched or passed over."""
        return self._set.iteration.num_launched == len(self._set.buckets)

    @property
    def not_launched(self) -> Sequence[Bucket]:
        """The buckets that have not been launched, in plan order."""
        return self._set.buckets[self._set.iteration.num_launched :]

    @property
    def missing(self) -> list[int]:
        """The parameters that buckets wait for, in plan order."""
        return [
            index for bucket in self._set.buckets if bucket.is_pending for index in sorted(bucket.iteration.pending)
        ]

    # A bucket becomes ready.

    def leave_out_unused(self) -> None:
        """When an iteration begins, pass over the buckets that no rank uses."""
        for bucket in self._set.buckets:
            if bucket.is_pending and self._policy.leaves_out(bucket):
                bucket.skip()

    def complete(self, bucket: Bucket) -> None:
        """Make a bucket ready with the ``.grad`` of its parameters, and with zeros for parameters that have none."""
        # If a bucket may be launched early, another rank may have launched it too early.
        keeps_own = bucket.may_launch_early and self.algorithm.traits.replayable
        gradients = bucket.contributions(self.sends, self._undefined.verify, keeps_own)
        self._make_ready(bucket, gradients)
        del gradients  # the number of references tells whether users hold one
        if self.sends and any(b.is_pending for b in self.not_launched):
            # This frees memory for the rest of the backward. At its end all buckets do this.
            bucket.gradient_store.point_at_views(bucket, bucket.iteration.unused)

    def complete_with(self, bucket: Bucket, gradients: Sequence[Tensor]) -> None:
        """Make a bucket ready with gradients that its parameters do not hold yet."""
        bucket.mark_used(bucket.param_indices)
        for index in bucket.param_indices:
            self._policy.note(index)
        self._make_ready(bucket, gradients)

    def do_without(self, absent: Iterable[int]) -> None:
        """Stop waiting for these parameters. They contribute their ``.grad``, or zeros."""
        awaited = [
            (index, bucket)
            for index, bucket in ((index, self._set.of_parameter[index]) for index in sorted(absent))
            if bucket.is_pending and index in bucket.iteration.pending
        ]
        for index, bucket in awaited:
            bucket.mark_unused(index)
        for index, bucket in awaited:
            if bucket.arrive(index):
                self.complete(bucket)

    def complete_missing_as_unused(self, after_forward: bool) -> bool:
        """At the end of a backward, complete what need not wait; False if the iteration waits for another backward."""
        absent = self._policy.absent_at_the_end(frozenset(self.missing))
        if absent is not None:
            self.do_without(absent)
            for bucket in self._set.buckets:
                if bucket.is_pending:  # its arrivals were not counted
                    self.complete(bucket)
            return True
        if after_forward:
            return False
        self._complete_with_means()
        return True

    def _complete_with_means(self) -> None:
        """Complete the iteration of a backward without a forward before it, for example of a regularizer.

        Parameters that it did not reach hold the mean of the previous iteration, which is the same on all ranks, so
        another mean does not change it. A bucket with a parameter that holds none is passed over, and its gradients are
        reduced in the next iteration.
        """
        lacking = [
            bucket
            for bucket in self.not_launched
            if bucket.is_pending and any(gradient is None for gradient in bucket.gradients())
        ]
        if lacking and self.algorithm.traits.beyond_group:
            raise error_messages.left_out(lacking[0].describe())
        for bucket in lacking:  # first: the last one that is launched is told that no other follows
            bucket.skip()
            self._set.iteration.is_whole = False
        for bucket in self.not_launched:
            if bucket.is_pending:
                self.complete(bucket)
        self._launch_ready()

    def _make_ready(self, bucket: Bucket, gradients: Sequence[Tensor]) -> None:
        """Flatten a bucket, and launch the buckets that are ready then."""
        if not self.sends:
            bucket.keep_local()
            self._launch_ready()
            return
        with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_ready"):
            bucket.flatten(gradients, self._scale)
        self.records.bucket_is_ready(bucket.spec.index)
        self._launch_ready()
        if bucket.is_ready:  # an earlier bucket is not; it will launch this one, perhaps on another stream
            bucket.note_flattened()

    def launch_shadows(self) -> None:
        """Launch every bucket with zeros, since this rank has no input left but the others continue to train."""
        self._set.iteration.is_shadow = True
        self.leave_out_unused()
        for bucket in self._set.buckets:
            if bucket.is_pending:
                bucket.flatten_zeros()
        self._launch_ready()

    def launch_again(self, bucket: Bucket, gradients: Sequence[Tensor]) -> None:
        """Reduce a bucket a second time in this iteration. Every rank does so, in the same order.

        The bucket has been waited for, and the algorithm is replayable. ``gradients`` are sent instead of those of the
        first launch. A shadow sends zeros.
        """
        if self._set.iteration.is_shadow:
            bucket.flatten_zeros()
        else:
            bucket.flatten(gradients, self._scale)
        self._launch(bucket, is_last=False)

    # It is launched, when it is its turn.

    def _launch_ready(self) -> None:
        iteration = self._set.iteration
        before = iteration.num_launched
        while not self.all_launched and (bucket := self.not_launched[0]).is_ready:
            if self.sends and not bucket.iteration.is_skipped:
                iteration.has_launched = True
                self._launch(bucket, is_last=all(later.iteration.is_skipped for later in self.not_launched[1:]))
            iteration.num_launched += 1
        if self.all_launched and iteration.num_launched > before:
            iteration.is_exchange = iteration.is_whole and self.world_size > 1 and self.algorithm.meets_others
            if iteration.is_exchange:
                self._monitor.last_bucket_is_launched(self._plan, self.algorithm.name, is_shared=False)
            self.on_all_launched()

    def _launch(self, bucket: Bucket, is_last: bool) -> None:
        """The one place that hands a bucket to the algorithm, which may wait for the previous bucket."""
        profiled = f"ddp_compile::bucket_{bucket.spec.index}_launch"
        with Exchange(partial(_reduction_failed, bucket), self._monitor, profiled=profiled):
            if is_last:
                is_shared = self.algorithm.shares_process_group
                self._monitor.last_bucket_is_launched(self._plan, self.algorithm.name, is_shared)
            bucket.await_flatten()
            transfer = self.records.launch_begins("reduce", bucket.spec.index, bucket.spec.num_bytes)
            work: Any = bucket.call_by_name(self.algorithm.launch, bucket, is_last)
            if not callable(getattr(work, "wait", None)):  # a user's algorithm may return anything
                raise error_messages.nothing_to_wait_for(self.algorithm.name, bucket.describe(), work)
            bucket.reduction_begins(work)
            self.records.launch_ends(transfer, work)

    # It is reduced.

    def drain(self) -> None:
        """Return when nothing that was launched will start another collective; before anything else is sent."""
        with Exchange(None, self._monitor, records=self.records):
            self.algorithm.drain()

    def wait(self) -> None:
        """Wait for what has been launched; raises ReductionError if a reduction failed or timed out."""
        self.drain()
        under_way = [bucket for bucket in self._set.buckets if bucket.is_under_way]
        if under_way:
            self._monitor.buckets_are_awaited()
        for bucket in under_way:
            index = bucket.spec.index
            with Exchange(
                partial(_reduction_failed, bucket),
                self._monitor,
                where=f", bucket {index}",
                profiled=f"ddp_compile::bucket_{index}_wait",
                records=self.records,
                transfer=("reduce", index),
            ):
                bucket.wait()

    def finish(self, untouched: Set[int]) -> None:
        """Wait for the launched buckets, and make every ``.grad`` the reduced gradient.

        Parameters whose numbers are in ``untouched`` got no gradient on any rank, and their ``.grad`` does not change.
        Raises a ReductionError if a reduction failed or timed out, and a RanksDifferError if the ranks are out of step.
        """
        if self._set.iteration.is_shadow:
            self.wait()
            return
        launched = [bucket for bucket in self._set.buckets if bucket.iteration.work is not None]
        for bucket in launched:
            bucket.gradient_store.point_at_views(bucket, untouched)
        self.wait()
        self._monitor.compare()
        self.algorithm.sharding.hand_over(self._set.buckets, launched, untouched)
        if not self.sends:  # as DistributedDataParallel on one rank
            undefined = self._set.iteration.undefined - untouched
            for index in undefined:
                fill_with_zeros(self._set.parameters[index])
            self._normalizer.normalize_alone(self._set.parameters, self.records)

    def after_backward(self) -> None:
        """Every ``.grad`` has its final value: the algorithm may communicate."""
        with Exchange(None, self._monitor, records=self.records):
            if self.algorithm.step_watch is not None:
                self.algorithm.step_watch.iteration_ends()
            self.algorithm.after_backward()


def _reduction_failed(bucket: Bucket, error: RuntimeError) -> ReductionError:
    return error_messages.reduction_failed(bucket.describe(), error)
