"""Who is told of the buckets that compiled backwards have computed, by the operators of `ddp_compile.graph_ops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ddp_compile.runtime.arrivals.parameter_hooks import ParameterHooks
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.buckets.computed_bucket import EarlyDecision
from ddp_compile.runtime.early_launch import NoEarlyLaunch
from ddp_compile.runtime.launch_queue import LaunchQueue
from ddp_compile.runtime.lifecycle import Lifecycle, State


class Arrivals(Protocol):
    """What is asked of the reducer."""

    def hooks_have_run(self) -> None: ...

    def enter_backward(self, arriving: tuple[int, ...]) -> None: ...


class BucketReceiver:
    """Decides what becomes of a computed bucket, and gives the backward what it is to return.

    Args:
        bucket_set: The buckets.
        queue: Launches them.
        hooks: Batch the gradients that come meanwhile.
        early: Knows which buckets may be launched early.
        lifecycle: Of the reducer.
        reducer: Begins a backward, and completes buckets whose hooks have run.
    """

    def __init__(
        self,
        bucket_set: BucketSet,
        queue: LaunchQueue,
        hooks: ParameterHooks,
        early: NoEarlyLaunch,
        lifecycle: Lifecycle,
        reducer: Arrivals,
    ) -> None:
        self._early = early
        self._set = bucket_set
        self._queue = queue
        self._hooks = hooks
        self._lifecycle = lifecycle
        self._reducer = reducer
        self._is_stopped = False

    def stop(self) -> None:
        """Let every bucket wait from now on: a backward that is still to come has the operators in it."""
        self._is_stopped = True

    def mark_bucket_ready(self, param_indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Take note that a compiled backward has computed a whole bucket, and launch it if that is safe.

        Nobody has seen the gradients yet, and they may not be all that comes; Note [Launched before AccumulateGrad] in
        `early_launch` says when the bucket is launched. Otherwise that happens when its parameters' hooks have run.

        Args:
            param_indices: The bucket's parameters in its order.
            gradients: Their gradients, which the backward goes on to return; they are only read.
        """
        bucket, decision = self._decide(tuple(param_indices), moves=False)
        if bucket is not None:
            self._early.follow(bucket, decision, gradients, can_be_replayed=self._queue.algorithm.traits.replayable)

    def move_bucket(self, param_indices: Sequence[int], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """`mark_bucket_ready` for a backward that returns other tensors than those it has computed.

        Args:
            param_indices: The bucket's parameters in its order.
            gradients: Their gradients, which are needed no more after this.

        Returns:
            What the backward is to return: views into the flat buffer if the bucket is launched now, copies otherwise.
        """
        bucket, decision = self._decide(tuple(param_indices), moves=True)
        if bucket is not None and decision is EarlyDecision.LAUNCH:
            bucket.claim(bucket.gradients())  # while ``.grad`` says which views are gradients
            views = bucket.new_views()
            self._early.follow(bucket, decision, views, moved=gradients)
            return views
        pairs = zip(param_indices, gradients, strict=True)
        copies = [torch.empty_like(self._set.parameters[index]).copy_(gradient) for index, gradient in pairs]
        if bucket is not None:
            self._early.follow(bucket, decision, copies, can_be_replayed=False)
        return copies

    @property
    def gathers_parameters(self) -> bool:
        """Whether parameters may still be written when a forward begins."""
        return self._queue.algorithm.sharding.gathers_parameters

    def await_parameters(self, param_indices: Sequence[int]) -> None:
        """Compiled code is about to read these parameters: return when they are complete.

        Args:
            param_indices: Their numbers.
        """
        self._queue.algorithm.sharding.await_parameters(param_indices)

    def ignore_computed_buckets(self, buckets: Sequence[tuple[int, ...]]) -> None:
        """Let these buckets wait for their hooks from now on, whatever graphs compute.

        Args:
            buckets: The parameters of each, in its order.
        """
        self._early.ignore(buckets)

    def _decide(self, param_indices: tuple[int, ...], moves: bool) -> tuple[Bucket | None, EarlyDecision]:
        """What becomes of a bucket that a graph has computed: None if it waits, else the backward has begun."""
        wait, phase = (None, EarlyDecision.WAIT), self._lifecycle.phase
        if self._is_stopped or not self._queue.sends or phase.state in (State.LOCAL, State.FAILED):
            return wait
        if not self._set.buckets and not phase.after_forward:
            return wait  # see `BackwardsAlone`
        self._reducer.hooks_have_run()
        self._hooks.flush(param_indices[0])
        self._reducer.hooks_have_run()
        decision = self._early.decide(param_indices, not moves and self._queue.algorithm.traits.replayable)
        if decision is EarlyDecision.WAIT:
            return wait
        self._reducer.enter_backward(param_indices)
        bucket = self._set.of_param_indices.get(param_indices)
        # It may have been launched without what a forward's outputs did not lead to. Compiled code expects aligned
        # results; a comm hook leaves no room between the places.
        if bucket is None or not bucket.is_pending or (moves and not bucket.is_aligned):
            return wait
        return bucket, decision
