"""Keeps the ranks in step: they compare what they have done, and report where they were when a collective fails.

Note [Ranks that get out of step]
Collectives pair up by order alone. A rank that leaves out a backward, or calls one twice, reduces with another step of
the other ranks: means of gradients that do not belong together, and at the end a collective that no other rank joins.
So the ranks compare, see Note [Agreement points], and each posts where it stands, so that the error of a failed
collective can say where the others are. docs/divergence.md lists what can differ and what happens then.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing.util
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ddp_compile import torch_internals
from ddp_compile.errors import DDPCompileError, ReductionError, name_values, this_rank
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.collectives import name_from_rank_0
from ddp_compile.runtime.desync.agreement_points import AgreementPoints
from ddp_compile.runtime.desync.gathering import Gathering, pauses
from ddp_compile.runtime.desync.group_store import GroupStore, StoreLostError
from ddp_compile.runtime.desync.model_order import ModelOrder, order_in
from ddp_compile.runtime.desync.rank_status import RankStatuses

log = logging.getLogger(__name__)


class DesyncMonitor:
    """Lets the ranks of one module compare and post through the store of their process group while they train.

    Every rank constructs it at the same time. With one rank, or a process group without a store, nothing is exchanged.

    Args:
        device: Device for messages, one that the process group can reach.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, class_name: str) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_process_group_ranks(process_group)
        self._timeout_s = torch_internals.group_timeout(process_group, device).total_seconds()
        # The name separates it from other modules, and from an earlier process group in the same store.
        self._store = GroupStore(process_group, f"ddp_compile/{name_from_rank_0(process_group, device)}/")
        shared, own = order_in(process_group, self._store), ModelOrder(self._store, "own/")
        self._points = AgreementPoints(shared, own, class_name, self._rank, self._ranks)
        self._statuses = RankStatuses(self._store, self._rank, self._ranks)
        self._num_forwards: Counter[str] = Counter()
        self._num_meetings = 0
        #: The methods of the points themselves, since a wrapper would take time in every step.
        self.last_bucket_is_launched = self._points.last_bucket_is_launched
        self.iteration_ends = self._points.iteration_ends
        self.refuse_other_message = self._points.refuse_other_message
        self.model = self._points.model  #: this model's name among those that share the process group
        self.model_number = self._points.model_number  #: its number among them
        if self._store.lost is None:
            # torch keeps these callbacks forever, so they must not refer to this object.
            stop = torch_internals.watch_compilations(*_compilation_notes(weakref.ref(self._statuses)))
            weakref.finalize(self, stop)
            weakref.finalize(self, post_uncaught_error(self._statuses)).atexit = False

    @property
    def is_paused(self) -> bool:
        """Whether no fingerprints are compared, since ranks do different things on purpose."""
        return self._points.is_paused

    @is_paused.setter
    def is_paused(self, value: bool) -> None:
        self._points.is_paused = value

    @property
    def mark(self) -> int:
        """See `AgreementPoints.mark`."""
        return self._points.mark

    def local_steps_are(self, number: int) -> None:
        """How often an optimizer has stepped with gradients that no other rank has."""
        self._points.num_local_steps = number

    @property
    def awaits_backward(self) -> bool:
        """See `ForwardsLeftOut.awaits_backward`."""
        return self._points.forwards.awaits_backward

    def forward_begins(self, kind: str) -> None:
        """A forward begins: a "training forward", an "evaluation forward" and so on; each kind has its own count."""
        self._num_forwards[kind] += 1
        self._statuses.note(kind, self._num_forwards[kind])

    def buffers_are_broadcast(self, kind: str) -> None:
        """Record that the forward waits for rank 0's buffers."""
        self._points.buffers_are_broadcast()
        self._statuses.note(kind, self._num_forwards[kind], ", broadcast of buffers")

    def forward_ends(self, kind: str, outputs: Any = None, trains: bool = True) -> None:
        """A forward has returned.

        Args:
            kind: As in `forward_begins`.
            outputs: What it has returned, if its backward is to be reduced.
            trains: Whether all ranks have to call its backward, or none.
        """
        if outputs is not None:
            self._points.forwards.watch(outputs, counts=trains)
        self._statuses.note(kind, self._num_forwards[kind], " has returned")

    def backward_begins(self, after_forward: bool) -> None:
        """The first gradient of an iteration has arrived, after a synchronized forward or without one."""
        self._points.begins_after_forward = after_forward
        self._statuses.note("backward of iteration", self._points.iteration_number)

    def buckets_are_awaited(self) -> None:
        """The backward has ended, but buckets may still be under way."""
        self._statuses.note("waiting for the buckets of iteration", self._points.iteration_number)

    def backward_is_incomplete(self) -> None:
        """The backward has ended without all gradients, but another one may bring them."""
        self._statuses.note("backward of iteration", self._points.iteration_number, " has left gradients out")

    def compare(self) -> None:
        """All collectives of the iteration are over; see `AgreementPoints.compare`."""
        self._points.compare()
        self._statuses.note("iteration", self._points.iteration_number, " is over")

    def agree_on_algorithm(self, algorithm: str) -> None:
        """Wait until every rank has registered the hook, after iterations that were reduced without one.

        Raises:
            RanksDifferError: A rank registered another hook, or none within the process group's timeout.
        """
        try:
            described = self._meet("algorithm", f"registering the {algorithm}", algorithm, "no comm hook")
        except StoreLostError as error:
            described = None
            log.warning(
                "%s: it is not known whether every rank has registered the %s: the store of the process group is gone"
                " (%s)",
                this_rank(),
                algorithm,
                error,
            )
        if described is not None:
            differ = error_messages.algorithms_differ(described)
            self._statuses.raised(differ)  # ranks that do not register one will wait for this rank
            raise differ

    def agree_on_measurement(self, call: str, begins: str = "") -> None:
        """Wait until every rank has made the same call of a measurement between the same two steps.

        Without a store it does not wait; the exchange that follows does.

        Args:
            call: The call.
            begins: Text after it, which has to be the same on every rank too.

        Raises:
            RanksDifferError: A rank has made another one, or none within the process group's timeout.
        """
        try:
            described = self._meet("measurement", f"in {call}", call + begins, "nothing")
        except StoreLostError as error:
            described = None
            log.info("%s: no store says whether every rank is in %s (%s)", this_rank(), call, error)
        if described is not None:
            differ = error_messages.measurements_differ(described)
            self._statuses.fail(f": {differ}")  # the others will wait for this rank
            raise differ

    @contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """A context for a call that every rank has to make: errors of ranks that wait elsewhere say who is in it.

        Raises:
            ReductionError: In place of the RuntimeError of a collective inside.
        """
        self._statuses.note(f"in {call} before iteration", self._points.iteration_number)
        try:
            yield
        except DDPCompileError as error:
            self._statuses.raised(error)
            raise
        except RuntimeError as error:
            failure = error_messages.exchange_failed(f"comparison of the ranks in {call}", error)
            raise self.report_failure(failure) from error

    def _meet(self, kind: str, doing: str, value: str, absent: str) -> str | None:
        """Wait until every rank has come here; which rank came with which value, None if all have the same.

        Raises:
            StoreLostError: The store has not answered.
        """
        if len(self._ranks) == 1:
            return None
        iteration_number = self._points.iteration_number
        self._statuses.note(f"{doing} before iteration", iteration_number, waits_for_all=True)
        self._num_meetings += 1
        # Counters of an earlier call in which the ranks differed must not count in this one.
        name = f"{kind}/{iteration_number}/{self._num_meetings}"
        keys = {rank: f"{name}/{rank}" for rank in self._ranks}
        self._store.post(keys[self._rank], value)
        alike = f"{name}/{hashlib.sha256(value.encode()).hexdigest()[:16]}/registered"
        self._store.add(alike, 1)
        self._store.add(f"{name}/registered", 1)  # last: a rank that sees all of these also sees all additions above
        for _ in pauses(self._timeout_s, longest_s=1.0):
            if self._store.add(f"{name}/registered", 0) == len(keys):
                break
        if self._store.has_come_to(alike, len(keys)):
            return None

        def describe(found: dict[str, str]) -> str:
            return name_values({rank: found.get(key, absent) for rank, key in keys.items()})

        described = Gathering(self._store, name, list(keys.values())).summary(0.0, bool, describe)
        return f"{value} on rank {self._rank}, and others elsewhere" if described is None else described

    def raised(self, error: Exception) -> None:
        """A forward raised: post the error for the ranks that will wait for this one."""
        self._statuses.raised(error)

    def report_failure(self, error: ReductionError, what: str = "") -> ReductionError:
        """The error of a failed collective, with a table of where every rank is.

        Waits about a second for ranks whose collectives fail at the same time.

        Args:
            what: Text after the step that this rank is in, ", bucket 0" for example.
        """
        if len(self._ranks) == 1:
            return error
        self._statuses.fail(f"{what}: failed")
        return ReductionError(f"{error}\n{self._statuses.report()}")


def post_uncaught_error(statuses: RankStatuses) -> Callable[[], None]:
    """Post the exception that ends the process. Nothing else notices exceptions of a backward.

    Args:
        statuses: Of this rank; not kept alive.

    Returns:
        A function that undoes it.
    """
    alive = weakref.ref(statuses)

    def post() -> None:
        # A process started by multiprocessing is still handling the exception; otherwise the interpreter has stored it.
        error = sys.exception() or getattr(sys, "last_value", None)
        if isinstance(error, SystemExit):
            error = error.__context__  # torch.multiprocessing.spawn ends with it
        if isinstance(error, BaseException) and (left := alive()) is not None:
            left.raised(error)

    # Not ``atexit``, which processes started by multiprocessing skip. By its priority it runs before the averaging
    # thread tells the other ranks that this rank has ended, so they can read the error.
    finalizer: Any = multiprocessing.util.Finalize(None, post, exitpriority=1)
    return finalizer.cancel


def _compilation_notes(
    statuses: weakref.ref[RankStatuses],
) -> tuple[Callable[[str], None], Callable[[], None]]:
    """Callbacks for when torch begins to compile something, and for when it is done."""
    stood_at = ""

    def begin(compile_id: str) -> None:
        nonlocal stood_at
        if (alive := statuses()) is not None:
            stood_at = alive.now.at
            alive.note(f"{stood_at}, compiling {compile_id}")

    def end() -> None:
        if (alive := statuses()) is not None:
            alive.note(stood_at)

    return begin, end
