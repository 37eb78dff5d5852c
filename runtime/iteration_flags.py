"""The flags that the ranks exchange after the last bucket of an iteration."""

from functools import partial
from typing import Any

from ddp_compile.runtime.arrivals.policies import AllRequired
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.exchange import Exchange
from ddp_compile.runtime.comm.iteration_message import IterationMessage
from ddp_compile.runtime.desync.monitor import DesyncMonitor
from ddp_compile.runtime.early_launch import EarlyLaunch
from ddp_compile.runtime.launch_queue import LaunchQueue


class IterationFlags:
    """Sends this rank's flags in each iteration, and receives those of all ranks."""

    def __init__(
        self, bucket_set: BucketSet, queue: LaunchQueue, policy: AllRequired, early: EarlyLaunch, monitor: DesyncMonitor
    ) -> None:
        self._set = bucket_set
        self._queue = queue
        self._policy = policy
        self._early = early
        self._monitor = monitor
        is_needed = early.is_enabled or policy.has_flags
        device = bucket_set.parameters[0].device
        self._message = IterationMessage(bucket_set.process_group, device, is_needed, monitor.model_number)

    def all_are_launched(self) -> None:
        """After the last launch, tell the other ranks what was used here, unless there will be more to send.

        The end of the backward would be too late: several modules may reach it in different orders on different ranks.
        """
        if self._policy.has_flags and not self._early.has_flags:
            self.send()

    def send(self) -> None:
        """Send the flags to the other ranks, unless they have been sent. Other collectives may follow."""
        self._queue.drain()
        if self._message.is_under_way:
            return
        parts = [self._policy.flags(self._set.iteration.is_shadow)] if self._policy.has_flags else []
        if self._early.has_flags:
            parts.append(self._early.flags())
        if parts:
            self._message.send(parts, self._monitor.mark)

    def receive(self) -> None:
        """Take the flags of all ranks: which parameters were used; which buckets have to be launched again.

        Raises:
            ReductionError: A reduction, or the message, failed or timed out.
            GradientArrivalError: A bucket was launched too early and cannot be launched again, or a parameter was used
                although its bucket was left out.
        """
        early_has_flags, policy_has_flags = self._early.has_flags, self._policy.has_flags
        if not early_has_flags and not policy_has_flags:
            return
        self.send()
        if early_has_flags:
            self._queue.wait()  # before anything is launched again
        received = self._received()
        if policy_has_flags:
            self._policy.update(received[0])
            left_out = {i for bucket in self._set.buckets if bucket.iteration.is_skipped for i in bucket.param_indices}
            if used := left_out - self._policy.used_by_nobody:
                self._queue.wait()  # nothing may be under way when the iteration is given up
                raise error_messages.used_after_all([self._set.names[index] for index in sorted(used)])
        if early_has_flags:
            self._early.update(received[-1])

    def _received(self) -> list[bytes]:
        """Wait for the message that is under way; returns the flags of all ranks."""
        failed: Any = partial(error_messages.reduction_failed, "the message after the buckets")
        with Exchange(failed, self._monitor, records=self._queue.records):
            received = self._message.wait()
        if self._message.has_met_another:
            self._queue.wait()  # nothing may be under way when the iteration is given up
            self._monitor.refuse_other_message()
        return received
