"""Where complete buckets wait for their turn: they leave in plan order, and are waited for at the end."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch.distributed as dist
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.errors import ReductionError
from ddp_compile.runtime import refusals
from ddp_compile.runtime.algorithms.base import CommAlgorithm
from ddp_compile.runtime.bucket_buffer import BucketBuffer, BucketState
from ddp_compile.runtime.bucket_set import BucketSet
from ddp_compile.runtime.progress import Progress


class LaunchQueue:
    """The buckets of one plan on their way out.

    Args:
        bucket_set: The buckets.
        process_group: The ranks to average over.
        progress: What the ranks tell each other about it.
        algorithm: How a bucket is reduced; another one may take its place between two rounds.

    Every rank launches the same buckets in the same order, whatever order they are completed in: a collective finds its
    counterpart on another rank by its place in the sequence alone.
    """

    def __init__(
        self,
        bucket_set: BucketSet,
        process_group: dist.ProcessGroup,
        progress: Progress,
        algorithm: CommAlgorithm,
    ) -> None:
        self._set = bucket_set
        self.algorithm = algorithm
        self._progress = progress
        self._process_group = process_group
        self._rank = process_group.rank()
        self._num_gone = 0  # launched, or passed over
        self.has_sent = False  #: whether anything has left in this round

    @property
    def sends(self) -> bool:
        """Whether anything is reduced."""
        return self._process_group.size() > 1 or self.algorithm.traits.on_one_rank

    @property
    def _scale(self) -> float:
        """What gradients are multiplied by on their way into the flat buffer."""
        return 1.0 / self._process_group.size() if self.algorithm.traits.prescale else 1.0

    @property
    def all_gone(self) -> bool:
        """Whether every bucket of the round has left, or will not leave in it."""
        return self._num_gone == len(self._set.buckets)

    @property
    def still_here(self) -> Sequence[BucketBuffer]:
        """The buckets that have not left, in plan order."""
        return self._set.buckets[self._num_gone :]

    def complete(self, bucket: BucketBuffer, gradients: Sequence[Tensor]) -> None:
        """Bring a bucket's gradients into its flat buffer; `launch_ready` lets it leave.

        Args:
            bucket: A bucket all of whose gradients are there.
            gradients: The gradients, in the order of ``bucket.spec.gradients``.
        """
        if self.sends:
            with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_ready"):
                bucket.flatten(gradients, self._scale)
        bucket.state = BucketState.READY

    def launch_ready(self, skip: bool = False) -> bool:
        """Launch what can leave in plan order.

        Args:
            skip: The next bucket will not leave in this round; pass over it first.

        Returns:
            Whether the last bucket has gone now.
        """
        gone_before = self._num_gone
        if skip:
            self._num_gone += 1
        try:
            while not self.all_gone and (bucket := self._set.buckets[self._num_gone]).state is BucketState.READY:
                if self.sends:
                    self._launch(bucket, is_last=bucket is self._set.buckets[-1])
                bucket.state = BucketState.LAUNCHED
                self._num_gone += 1
        except ReductionError as error:  # of an algorithm, which may wait for the bucket before
            raise self._progress.report_failure(error) from error.__cause__
        except RuntimeError as error:
            failure = refusals.all_reduce_failed(self._rank, self.still_here[0].describe(), error)
            raise self._progress.report_failure(failure) from error
        return self.all_gone and self._num_gone > gone_before

    def _launch(self, bucket: BucketBuffer, is_last: bool) -> None:
        assert self._set.plan is not None
        self.has_sent = True
        if is_last:
            self._progress.last_bucket_leaves(self._set.plan, self.algorithm.name)
        with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_launch"):
            bucket.reduction_begins(self.algorithm.launch(bucket, is_last))

    def send_again(self, bucket: BucketBuffer, gradients: Sequence[Tensor]) -> None:
        """Reduce a bucket that has left in this round once more; every rank does so, in the same order.

        Args:
            bucket: It has been waited for. The algorithm is replayable.
            gradients: What to send in place of what was sent.
        """
        bucket.flatten(gradients, self._scale)
        bucket.reduction_begins(self.algorithm.launch(bucket, is_last=False))

    def finish(self, untouched: Set[int]) -> None:
        """Wait for what has been launched, and let every ``.grad`` be the reduced gradient.

        Args:
            untouched: Numbers of parameters that got no gradient on any rank: theirs stay what they were.

        Raises:
            ReductionError: A reduction failed or timed out.
            RanksDifferError: The ranks have found that they are out of step.
        """
        launched = (
            [bucket for bucket in self._set.buckets if bucket.state is BucketState.LAUNCHED] if self.sends else []
        )
        for bucket in launched:
            bucket.point_gradients_at_views(untouched)
        self.wait()
        self._progress.compare()
        for bucket in launched:
            bucket.hand_over(untouched)

    def drain(self) -> None:
        """Return when nothing that was launched will start another collective; before anything else is sent.

        Raises:
            ReductionError: What was launched has failed.
        """
        try:
            self.algorithm.drain()
        except ReductionError as error:
            raise self._progress.report_failure(error) from error.__cause__

    def wait(self) -> None:
        """Wait for what has been launched.

        Raises:
            ReductionError: A reduction failed or timed out.
        """
        self.drain()
        under_way = [bucket for bucket in self._set.buckets if bucket.is_under_way]
        if under_way:
            self._progress.buckets_are_awaited()
        for bucket in under_way:
            try:
                with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_wait"):
                    bucket.wait()
            except ReductionError as error:  # the algorithm's own
                raise self._progress.report_failure(error, f", bucket {bucket.spec.index}") from error.__cause__
            except RuntimeError as error:
                failure = refusals.all_reduce_failed(self._rank, bucket.describe(), error)
                raise self._progress.report_failure(failure, f", bucket {bucket.spec.index}") from error

    def reset(self) -> None:
        """Be ready for the next round."""
        for bucket in self._set.buckets:
            bucket.reset()
        self._num_gone = 0
        self.has_sent = False
