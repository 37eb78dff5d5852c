"""Raw records of steps on one rank, from which ``model.measure()`` makes a report.

Parts of the runtime call `NO_RECORDS`, which does nothing, until a measurement puts `StepRecords` in its place.

Note [When a transfer is done]
On the CPU a work's future tells when its transfer is done: a callback reads the clock in the process group's thread.
The callback needs the GIL. If the main thread holds it, the reading is late by as long as that, at most by Python's
switch interval (5 ms) unless native code holds it longer. A gloo work completes its future before its ``wait`` returns,
so no callback of a work that was waited for runs later; with other backends the wait's end stands in for it. Of other
works, callbacks may run while their process group is destroyed, which joins its threads; torch releases the GIL for
that. The callback refers to a list of times only.

A comm hook is done when its future is. The callbacks of a future may still run when its wait has returned, so a reading
counts only up to the end of the wait.

On an accelerator a side stream waits for the work and records an event; so it does for a hook whose future is complete
when the hook returns, as with NCCL. On gloo it is not known when messages are done: they have no future, and
``is_completed`` is false until they have been waited for (torch 2.13). Nor is it known of a chain of several
collectives, whose last one is started later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.comm import streams

Kind = Literal["reduce", "gather"]
#: What a wait or a call is for that is for no single transfer; see `RawStep`.
Block = Literal["blocked", "counts", "clips"]

#: A time on the host's monotonic clock in ns, or an event of a stream that will have one; see `streams.StreamClock`.
Mark = Any


@dataclass(slots=True, eq=False)
class RawTransfer:
    """One transfer of one bucket, on this rank's clock."""

    bucket: int
    kind: Kind
    num_bytes: int
    ready: Mark
    launched: Mark
    launch_returned: Mark = None
    num_works: int | None = None  #: whose completion is noted in ``done``; None if it is not known
    done: list[Mark] = field(default_factory=list)  #: written in the process group's threads
    waited_from: Mark = None
    waited_until: Mark = None


@dataclass(slots=True, eq=False)
class RawStep:
    """One step, on this rank's clock. Written from the end of the step before it on."""

    began: Mark = None
    backward_began: Mark = None
    ended: Mark = None
    transfers: list[RawTransfer] = field(default_factory=list)
    blocked: list[tuple[Mark, Mark]] = field(default_factory=list)  #: waits for the algorithm as a whole
    counts: list[tuple[Mark, Mark]] = field(default_factory=list)  #: those of them for the counts of ``normalize_by``
    clips: list[tuple[Mark, Mark]] = field(default_factory=list)  #: calls of ``clip_grad_norm_``, before it began
    number: int = 0
    ahead_ns: int = 0  #: by how much the device's clock had run ahead of the host's; see `StepRecords.read_all`


class NoRecords:
    """Records nothing. Indices are those of buckets."""

    def forward_begins(self) -> None:
        """A forward with gradients begins, of which a step may have several."""

    def backward_begins(self) -> None:
        """The first gradient of a reduced backward has arrived."""

    def bucket_is_ready(self, index: int) -> None:
        """All gradients of a bucket are in its flat buffer."""

    def launch_begins(self, kind: Kind, index: int, num_bytes: int) -> RawTransfer | None:
        """A bucket is handed to the algorithm, or its parameters are about to be gathered."""

    def launch_ends(self, transfer: RawTransfer | None, pending: object) -> None:
        """The algorithm has returned what can be waited for."""

    def wait_begins(self, kind: Kind, index: int) -> RawTransfer | None:
        """Somebody waits for a transfer."""

    def wait_ends(self, transfer: RawTransfer | None) -> None:
        """The wait is over."""

    def block_begins(self) -> Mark:
        """A wait begins that is for no single transfer, or a call of ``clip_grad_norm_``."""

    def block_ends(self, since: Mark, block: Block = "blocked") -> None:
        """It is over."""

    def gradients_are_handed_over(self) -> None:
        """Every ``.grad`` of the iteration is final."""

    def iteration_ends(self, plan: BucketPlan) -> None:
        """The iteration was completed in all parts."""

    def iteration_begins(self, number: int) -> None:
        """The iteration of this number begins, whatever has become of the one before it."""

    def exchange_if_due(self) -> None:
        """Nothing is under way, on any rank: the records can be exchanged."""


#: What is called while nothing is measured.
NO_RECORDS = NoRecords()


class StepRecords(NoRecords):
    """Records the steps of one model.

    Steps of different bucket plans are not kept together: records begin anew when the plan changes.

    Args:
        next_number: Number of the next iteration to end.
        first: Number of the first iteration to record; of those before it a part may be missing.
        wanted: How many steps to record; None for any number, of which the last ones are kept.
        kept: How many steps are kept.
        blocks_host: Whether the host waits in ``Work.wait()``.
        on_due: Called at the end of the iteration in which the last step was recorded.
    """

    def __init__(
        self,
        device: torch.device,
        next_number: int,
        first: int,
        wanted: int | None,
        kept: int,
        blocks_host: bool,
        on_due: Callable[[], None],
    ) -> None:
        self.plan: BucketPlan | None = None  #: of the steps
        self.steps: deque[RawStep] = deque(maxlen=kept)  #: complete, with all times known
        self._clock = streams.StreamClock(device)
        self._side = streams.SideStream(device)
        self._blocks_host = blocks_host
        self._number, self._first, self._wanted = next_number, first, wanted
        self._on_due = on_due
        self._step = RawStep()
        self._unread: deque[RawStep] = deque()  # on an accelerator: steps that it may not have come to the end of
        self._latest: dict[tuple[Kind, int], RawTransfer] = {}
        self._ready: dict[int, Mark] = {}

    # What is recorded.

    def forward_begins(self) -> None:
        if self._step.began is None:
            self._step.began = self._clock.mark()

    def backward_begins(self) -> None:
        if self._step.backward_began is None:
            self._step.backward_began = self._clock.mark()

    def bucket_is_ready(self, index: int) -> None:
        self._ready[index] = self._clock.mark()

    def launch_begins(self, kind: Kind, index: int, num_bytes: int) -> RawTransfer:
        now = self._clock.mark()
        transfer = RawTransfer(index, kind, num_bytes, self._ready.pop(index, now), now)
        self._step.transfers.append(transfer)
        self._latest[kind, index] = transfer
        return transfer

    def launch_ends(self, transfer: RawTransfer | None, pending: object) -> None:
        assert transfer is not None
        transfer.launch_returned = self._clock.mark()
        works = [pending] if isinstance(pending, dist.Work) else getattr(pending, "works", None)
        if works is not None:
            self._note_when_done(transfer, works)

    def _note_when_done(
        self, transfer: RawTransfer, works: Sequence[dist.Work | torch.Future[Any] | streams.Event]
    ) -> None:
        """See Note [When a transfer is done]."""
        if not works:  # there is no other rank
            transfer.num_works, transfer.done = 1, [transfer.launch_returned]
        elif not self._clock.is_of_host:
            if self._blocks_host or not all(work.done() for work in works if isinstance(work, torch.Future)):
                return  # the host would wait
            with self._side.on():
                for work in works:
                    work.wait()
                transfer.num_works, transfer.done = 1, [self._clock.mark()]
        else:
            try:
                futures: list[Any] = [work.get_future() if isinstance(work, dist.Work) else work for work in works]
            except RuntimeError:  # messages of gloo have none
                return
            transfer.num_works, done = len(futures), transfer.done
            for future in futures:
                future.add_done_callback(lambda _: done.append(time.monotonic_ns()))

    def wait_begins(self, kind: Kind, index: int) -> RawTransfer | None:
        transfer = self._latest.get((kind, index))
        if transfer is None or transfer.waited_from is not None:
            return None  # it was launched before records began, or two threads read the same parameters
        transfer.waited_from = self._clock.mark()
        return transfer

    def wait_ends(self, transfer: RawTransfer | None) -> None:
        if transfer is not None:
            transfer.waited_until = self._clock.mark()

    def block_begins(self) -> Mark:
        return self._clock.mark()

    def block_ends(self, since: Mark, block: Block = "blocked") -> None:
        getattr(self._step, block).append((since, self._clock.mark()))

    def gradients_are_handed_over(self) -> None:
        self._step.ended = self._clock.mark()

    # Steps.

    def iteration_ends(self, plan: BucketPlan) -> None:
        step = self._step
        step.number = self._number
        self._number += 1
        if plan is not self.plan:
            self.plan = plan
            self.steps.clear()
            self._unread.clear()
            self._first = max(self._first, step.number)
        if step.number >= self._first and step.began is not None and step.ended is not None:
            self._unread.append(step)
            self._read(wait=False)

    def iteration_begins(self, number: int) -> None:
        self._number = max(self._number, number)  # one that raised has a number; a rank that is alone counts here
        self._step = RawStep()
        self._latest.clear()
        self._ready.clear()

    def exchange_if_due(self) -> None:
        if self._wanted is not None and self._number - self._first >= self._wanted:
            self._on_due()

    @property
    def num_steps(self) -> int:
        """Number of iterations seen, including failed ones."""
        return max(0, self._number - self._first)

    def read_all(self) -> list[RawStep]:
        """All complete steps; on an accelerator, after waiting for their end, with ``ahead_ns``."""
        self._read(wait=True)
        since_ns, share = self._clock.drift()
        for step in self.steps:
            step.ahead_ns = round(share * (step.began - since_ns))
        return list(self.steps)

    def _read(self, wait: bool) -> None:
        """Turn marks of steps into times, of those steps that the device has finished unless it is waited for."""
        while self._unread and self._clock.has_passed(self._unread[0].ended, wait):
            step = self._unread.popleft()
            read = self._clock.read
            step.backward_began = read(step.backward_began)
            step.ended = read(step.ended)
            for intervals in (step.blocked, step.counts, step.clips):
                intervals[:] = [(read(since), read(until)) for since, until in intervals]
            for transfer in step.transfers:
                transfer.ready, transfer.launched = read(transfer.ready), read(transfer.launched)
                transfer.launch_returned = read(transfer.launch_returned)
                transfer.waited_from, transfer.waited_until = read(transfer.waited_from), read(transfer.waited_until)
                # One that a callback has recorded after the wait may still be ahead of the device.
                done = [read(mark) for mark in transfer.done if self._clock.has_passed(mark, wait=False)]
                ends = [max(done)] if len(done) == transfer.num_works else []
                if transfer.num_works is not None and transfer.waited_until is not None:
                    ends = [min([*ends, transfer.waited_until])]  # a callback may run when the wait is over
                transfer.done = ends
            step.began = self._clock.move_to(step.began)
            self.steps.append(step)
