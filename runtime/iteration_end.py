"""The end of an iteration: the message between the ranks, the waits and the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ddp_compile.errors import DDPCompileError, ReductionError
from ddp_compile.runtime.arrivals.policies import AllRequired
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.iteration_message import IterationMessage
from ddp_compile.runtime.desync.monitor import DesyncMonitor
from ddp_compile.runtime.early_launch import EarlyLaunch
from ddp_compile.runtime.finite_check import FiniteCheck
from ddp_compile.runtime.launch_queue import LaunchQueue


class IterationEnd:
    """Sends the message of each iteration, receives those of the other ranks, and waits for the buckets.

    Args:
        on_reduced: Called when every ``.grad`` of an iteration is final, before the backward returns.
    """

    def __init__(
        self,
        bucket_set: BucketSet,
        queue: LaunchQueue,
        policy: AllRequired,
        early: EarlyLaunch,
        monitor: DesyncMonitor,
        on_reduced: Callable[[], None],
    ) -> None:
        checks_finite = bucket_set.config.check_finite_gradients
        self._set = bucket_set
        self._queue = queue
        self._policy = policy
        self._early = early
        self._monitor = monitor
        self._on_reduced = on_reduced
        self._futures: list[torch.futures.Future[Any]] = []
        self._finite_check = FiniteCheck(bucket_set, queue) if checks_finite else None
        may_speak = early.is_enabled or policy.has_message or checks_finite
        device = bucket_set.parameters[0].device
        self._message = IterationMessage(bucket_set.process_group, device, may_speak, monitor.model_number)

    def all_are_launched(self) -> None:
        """After the last launch, tell the other ranks what was used here, unless there will be more to send.

        The end of the backward would be too late: several modules may reach it in different orders on different ranks.
        """
        if self._policy.has_message and not self._early.has_message:
            self.tell_the_others()

    def await_also(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Make the end of the next iteration wait for these as well."""
        done = [future for future in self._futures if future.done()]
        torch.futures.wait_all(done)  # for their errors, since a forward need not have a backward
        self._futures = [future for future in self._futures if not future.done()] + list(futures)

    def tell_the_others(self) -> None:
        """Send the message to the other ranks, unless it has been sent. Other collectives may follow."""
        self._queue.drain()
        if self._message.is_under_way:
            return
        parts = [self._policy.message(self._set.iteration.is_shadow)] if self._policy.has_message else []
        if self._early.has_message:
            parts.append(self._early.message())
        if parts:
            self._message.send(parts, self._monitor.mark)

    def finish(self) -> None:
        """Receive the other ranks' messages, wait for the buckets, and hand over their gradients.

        Raises:
            ReductionError: A reduction, or the message, failed or timed out.
            GradientArrivalError: A bucket was launched too early and cannot be launched again, or a parameter was used
                although its bucket was left out.
            RanksDifferError: The ranks have found that they are out of step.
            NonFiniteGradientError: With ``check_finite_gradients``, a gradient of some rank was infinite or NaN. All
                else is done, except for ``on_reduced``.
        """
        self._hear_the_others()
        iteration = self._set.iteration
        if iteration.is_shadow:
            self._queue.wait()
        else:
            self._queue.finish(self._policy.used_by_nobody)
        futures, self._futures = self._futures, []
        torch.futures.wait_all(futures)
        if iteration.is_whole:
            algorithm = self._queue.algorithm
            since = self._queue.records.block_begins()
            try:
                if algorithm.step_watch is not None:
                    algorithm.step_watch.iteration_ends()
                algorithm.after_backward()
            except ReductionError as error:
                raise self._monitor.report_failure(error) from error.__cause__
            self._queue.records.block_ends(since)
        self._refuse_non_finite()
        self._queue.records.gradients_are_handed_over()
        if not iteration.is_shadow:
            with self._queue.algorithm.using_parameters(trains=False):
                self._on_reduced()

    def _hear_the_others(self) -> None:
        early_speaks, policy_speaks = self._early.has_message, self._policy.has_message
        if not early_speaks and not policy_speaks:
            return
        self.tell_the_others()
        if early_speaks:
            self._queue.wait()  # before anything is launched again
        heard = self._heard()
        if policy_speaks:
            self._policy.hear(heard[0])
            if used := self._queue.left_out - self._policy.used_by_nobody:
                self._queue.wait()  # nothing may be under way when the iteration is given up
                raise error_messages.used_after_all([self._set.names[index] for index in sorted(used)])
        if early_speaks:
            self._early.finish(heard[-1])

    def _refuse_non_finite(self) -> None:
        """With ``check_finite_gradients``, raise on every rank if a gradient of any rank was infinite or NaN."""
        if self._finite_check is None or not self._finite_check.has_message:
            return
        found = self._finite_check.found_here()
        with self._told_if_it_fails():
            self._message.send([bytearray([found != ""])], self._monitor.mark)
        if any(self._heard()[0]):
            with self._told_if_it_fails():
                raise self._finite_check.error(found)

    def _heard(self) -> list[bytes]:
        """Wait for the message that is under way; returns the flags of all ranks."""
        since = self._queue.records.block_begins()
        with self._told_if_it_fails():
            heard = self._message.wait()
        self._queue.records.block_ends(since)
        if self._message.has_met_another:
            self._queue.wait()  # nothing may be under way when the iteration is given up
            self._monitor.refuse_other_message()
        return heard

    @contextmanager
    def _told_if_it_fails(self) -> Iterator[None]:
        """A context for messages between the ranks, which reports a failure and raises it as a ReductionError."""
        try:
            yield
        except DDPCompileError:
            raise
        except RuntimeError as error:
            failure = error_messages.reduction_failed("the message after the buckets", error)
            raise self._monitor.report_failure(failure) from error
