"""The end of an iteration: what the ranks tell each other behind the buckets, and all that has to be waited for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ddp_compile.errors import DDPCompileError, ReductionError
from ddp_compile.runtime.arrivals.policies import AllRequired
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.buckets.reducer_settings import ReducerSettings
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.iteration_message import IterationMessage
from ddp_compile.runtime.early_launch import NoEarlyLaunch, Verdict, own_gradients
from ddp_compile.runtime.finite_check import FiniteCheck
from ddp_compile.runtime.launch_queue import LaunchQueue

log = logging.getLogger(__name__)


class IterationEnd:
    """Sends the one message of an iteration, lets those who have something in it hear the others, and waits.

    Args:
        bucket_set: The buckets.
        queue: Launches them.
        policy: Says which gradients were used here.
        early: Says which buckets were launched too early.
        settings: Of the reducer.
        names: Fully qualified names of the parameters.
        process_group: The ranks.
    """

    def __init__(
        self,
        bucket_set: BucketSet,
        queue: LaunchQueue,
        policy: AllRequired,
        early: NoEarlyLaunch,
        settings: ReducerSettings,
        names: Sequence[str],
        process_group: dist.ProcessGroup,
    ) -> None:
        self._early = early
        self._queue = queue
        self._policy = policy
        self._monitor = settings.monitor
        self._on_reduced = settings.on_reduced
        self._futures: list[torch.futures.Future[Any]] = []
        self._names = names
        self._rank = process_group.rank()
        device = bucket_set.parameters[0].device
        self._finite_check: FiniteCheck | None = None
        if settings.check_finite_gradients:
            self._finite_check = FiniteCheck(bucket_set, queue, process_group, device)
        may_speak = settings.launches_in_backward or policy.has_message or settings.check_finite_gradients
        self._message = IterationMessage(process_group, device, may_speak, settings.monitor.model_number)

    @property
    def _early_has_message(self) -> bool:
        """Whether the ranks have to hear which buckets were launched too early; False if none was launched."""
        return self._early.has_message and self._queue.has_launched

    def _used_here(self) -> bytearray:
        return self._policy.message_of_shadow() if self._queue.is_shadow else self._policy.message()

    def all_are_launched(self) -> None:
        """After the last bucket: tell the other ranks what was used here, if there will be no more to say.

        Not at the end of the backward, which several modules may reach in another order on each rank.
        """
        if self._policy.has_message and not self._early_has_message:
            self._queue.drain()
            self._message.send([self._used_here()])

    def await_also(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Let the end of the next iteration wait for these as well."""
        done = [future for future in self._futures if future.done()]
        torch.futures.wait_all(done)  # for their errors: a forward need not have a backward
        self._futures = [future for future in self._futures if not future.done()] + list(futures)

    def finish(self) -> None:
        """Hear what the other ranks have to say, wait for the buckets, and hand their gradients over.

        Raises:
            ReductionError: A reduction, or the message, failed or timed out.
            GradientArrivalError: A bucket was launched too early and cannot be launched again, or was left out and has
                been used.
            RanksDifferError: The ranks have found that they are out of step.
            NonFiniteGradientError: With ``check_finite_gradients``, a gradient of some rank was infinite or NaN. All
                else is done, except for `ReducerSettings.on_reduced`.
        """
        self._hear_the_others()
        if self._queue.is_shadow:
            self._queue.wait()
        else:
            self._queue.finish(self._policy.used_by_nobody)
        futures, self._futures = self._futures, []
        torch.futures.wait_all(futures)
        if self._queue.is_whole:
            self._exchange_parameters()
        self._refuse_non_finite()
        if not self._queue.is_shadow:
            with self._queue.algorithm.evaluation():
                self._on_reduced()

    def _exchange_parameters(self) -> None:
        try:
            self._queue.algorithm.after_backward()
        except ReductionError as error:
            raise self._monitor.report_failure(error) from error.__cause__

    def tell_the_others(self) -> None:
        """The backward has ended: tell the other ranks what there is to say, if anything, unless they know.

        Afterwards the caller may send something else, before the buckets are waited for.
        """
        self._queue.drain()
        early_speaks, policy_speaks = self._early_has_message, self._policy.has_message
        if self._message.is_under_way or not (early_speaks or policy_speaks):
            return
        parts = [self._used_here()] if policy_speaks else []
        if early_speaks:
            parts.append(self._early.message(self._queue.algorithm.traits.replayable))
        self._message.send(parts)

    def _hear_the_others(self) -> None:
        early_speaks, policy_speaks = self._early_has_message, self._policy.has_message
        if not early_speaks and not policy_speaks:
            return
        self.tell_the_others()
        if early_speaks:
            self._queue.wait()  # before anything is launched again
        heard = self._heard()
        if policy_speaks:
            self._policy.hear(heard[0])
            self._refuse_use_of_left_out()
        if early_speaks:
            self._launch_again(self._early.verdict(heard[-1]))

    def _refuse_non_finite(self) -> None:
        """With ``check_finite_gradients``, raise on every rank if a gradient of any was infinite or NaN."""
        if self._finite_check is None or not self._finite_check.has_message:
            return
        found = self._finite_check.found_here()
        with self._told_if_it_fails():
            self._message.send([bytearray([found != ""])])
        if any(self._heard()[0]):
            with self._told_if_it_fails():
                raise self._finite_check.error(found)

    def _heard(self) -> list[bytes]:
        """Wait for the message that is under way; returns what all ranks have said in it."""
        with self._told_if_it_fails():
            heard = self._message.wait()
        if self._message.has_met_another:
            self._queue.wait()  # nothing may be under way when the iteration is given up
            self._monitor.refuse_other_model()
        return heard

    @contextmanager
    def _told_if_it_fails(self) -> Iterator[None]:
        """Around messages between the ranks: report a failure, and raise it as a ReductionError."""
        try:
            yield
        except DDPCompileError:
            raise
        except RuntimeError as error:
            what = "the message after the buckets"
            failure = error_messages.reduction_failed(what, error)
            raise self._monitor.report_failure(failure) from error

    def _refuse_use_of_left_out(self) -> None:
        """Raise on every rank if one has used a parameter whose bucket was left out on all."""
        if used := self._queue.left_out - self._policy.used_by_nobody:
            self._queue.wait()  # nothing may be under way when the iteration is given up
            raise error_messages.used_after_all([self._names[index] for index in sorted(used)])

    def _launch_again(self, verdict: Verdict) -> None:
        """Launch buckets once more that were launched too early."""
        names = [self._names[index] for index in verdict.late]
        algorithm = self._queue.algorithm
        if not verdict.can_be_replayed:
            name = None if algorithm.traits.replayable else algorithm.name
            raise error_messages.contributor_after_launch(names, name, self._early.has_moved)
        for bucket in verdict.buckets:
            log.warning(
                "rank %d: %s was launched inside the backward before all was there, is launched again, and will not be"
                " launched early any more: on some rank %s got more than one gradient",
                self._rank,
                bucket.describe(),
                ", ".join(names),
            )
            self._queue.launch_again(bucket, [] if self._queue.is_shadow else own_gradients(bucket))
        self._queue.wait()
        self._early.put_back()
