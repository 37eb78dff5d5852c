"""Keeps the ranks in step: they compare what they have done, and report where they were when a collective fails.

Note [Ranks that get out of step]
Collectives pair up by order alone. A rank that leaves out a backward, or calls one twice, reduces with another step of
the other ranks: means of gradients that do not belong together, and at the end a collective that no other rank joins.
So the ranks compare, see Note [Agreement points], and each posts where it stands, so that the error of a failed
collective can say where the others are. docs/divergence.md lists what can differ and what happens then.
"""

import hashlib
import logging
import multiprocessing.util
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_compile import torch_internals
from ddp_compile.config import CheckReplicas
from ddp_compile.errors import DDPCompileError, RanksDifferError, ReductionError, name_values, this_rank
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.collectives import name_from_rank_0
from ddp_compile.runtime.comm.exchange import Exchange
from ddp_compile.runtime.desync.agreement_points import AgreementPoints
from ddp_compile.runtime.desync.gathering import Gathering, pauses
from ddp_compile.runtime.desync.group_store import GroupStore, StoreLostError
from ddp_compile.runtime.desync.model_order import ModelOrder, order_in
from ddp_compile.runtime.desync.rank_status import RankStatuses

log = logging.getLogger(__name__)


class DesyncMonitor(AgreementPoints):
    """Lets the ranks of one module compare and post through the store of their process group while they train.

    Every rank constructs it at the same time. With one rank, or a process group without a store, nothing is exchanged.

    Args:
        device: Device for messages, one that the process group can reach.
        check_replicas: The argument of ``ddp_compile``.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device,
        class_name: str,
        check_replicas: CheckReplicas = "raise",
    ) -> None:
        rank, ranks = dist.get_rank(), dist.get_process_group_ranks(process_group)
        self._timeout_s = torch_internals.group_timeout(process_group, device).total_seconds()
        # The name separates it from other modules, and from an earlier process group in the same store.
        self._store = GroupStore(process_group, f"ddp_compile/{name_from_rank_0(process_group, device)}/")
        own = ModelOrder(self._store, "own/")
        super().__init__(order_in(process_group, self._store), own, class_name, rank, ranks, check_replicas)
        self._statuses = RankStatuses(self._store, rank, ranks)
        self._num_forwards: Counter[str] = Counter()
        self._num_meetings = 0
        if self._store.lost is None:
            # torch keeps these callbacks forever, so they must not refer to this object.
            stop = torch_internals.watch_compilations(*_compilation_notes(weakref.ref(self._statuses)))
            weakref.finalize(self, stop)
            weakref.finalize(self, post_uncaught_error(self._statuses)).atexit = False

    def forward_begins(self, kind: str) -> None:
        """A "training forward", "evaluation forward", "validation" and so on begins; each kind has its own count."""
        self._num_forwards[kind] += 1
        self._statuses.note(kind, self._num_forwards[kind])

    def buffers_are_broadcast(self, kind: str) -> None:
        """Record that the forward waits for rank 0's buffers."""
        self._shared.sends("buffers", self.model)
        self._statuses.note(kind, self._num_forwards[kind], ", broadcast of buffers")

    def forward_ends(self, kind: str, outputs: Any = None, trains: bool = True, is_local: bool = False) -> None:
        """A forward has returned ``outputs``, given if it may have a backward; ``kind`` as in `forward_begins`.

        If ``trains``, all ranks have to call its backward, or none. ``is_local`` is for a forward inside ``no_sync``.
        """
        if outputs is not None:
            self.forwards.watch(outputs, trains, is_local)
        self._statuses.note(kind, self._num_forwards[kind], " has returned")

    def backward_begins(self, after_forward: bool) -> None:
        """The first gradient of an iteration has arrived, after a synchronized forward or without one."""
        self.begins_after_forward = after_forward
        self._statuses.note("backward of iteration", self.iteration_number)

    def buckets_are_awaited(self) -> None:
        """The backward has ended, but buckets may still be under way."""
        self._statuses.note("waiting for the buckets of iteration", self.iteration_number)

    def backward_is_incomplete(self) -> None:
        """The backward has ended without all gradients, but another one may bring them."""
        self._statuses.note("backward of iteration", self.iteration_number, " has left gradients out")

    def compare(self) -> None:
        super().compare()
        self._statuses.note("iteration", self.iteration_number, " is over")

    def agree_on_algorithm(self, algorithm: str) -> None:
        """After iterations without it, wait until every rank registers the hook; else raises a RanksDifferError."""
        self._meet(
            "algorithm", f"registering the {algorithm}", algorithm, "no comm hook", error_messages.algorithms_differ
        )

    def agree_on_normalizing(self) -> None:
        """After iterations without it, wait until every rank calls ``normalize_by``; else raises a RanksDifferError."""
        self._meet("normalizer", "in its first normalize_by()", "called", "not called", error_messages.counts_differ)

    def agree_on_warm_up(self, timeout_s: float) -> None:
        """Wait until every rank has compiled in ``warm_up``; raises RanksDifferError if one has not, or not in time."""
        differ = partial(error_messages.warm_ups_differ, timeout_s=timeout_s)
        self._meet("warm-up", "waiting in warm_up()", "done", "not done", differ, timeout_s)

    def warm_up_raised(self, error: Exception) -> None:
        """Compiling in ``warm_up`` has raised: the other ranks need not wait for this one."""
        if len(self._ranks) > 1 and self._store.lost is None:
            self._num_meetings += 1
            with suppress(StoreLostError):
                self._register(
                    f"warm-up/{self.iteration_number}/{self._num_meetings}", f"raised {type(error).__name__}"
                )

    def agree_on_measurement(self, call: str, begins: str = "") -> None:
        """Wait until every rank has made the same call, and with the same ``begins``, between the same two steps.

        Without a store it does not wait; the exchange that follows does. Raises a RanksDifferError if a rank has made
        another call, or none within the process group's timeout.
        """
        self._meet("measurement", f"in {call}", call + begins, "nothing", error_messages.measurements_differ)

    @contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """A context for a call that every rank has to make: errors of ranks that wait elsewhere say who is in it.

        A RuntimeError of a collective inside becomes a ReductionError.
        """
        self._statuses.note(f"in {call} before iteration", self.iteration_number)
        try:
            with Exchange(f"comparison of the ranks in {call}", self):
                yield
        except DDPCompileError as error:
            self._statuses.raised(error)
            raise

    def _meet(
        self,
        kind: str,
        doing: str,
        value: str,
        absent: str,
        differ: Callable[[str], RanksDifferError],
        timeout_s: float | None = None,
    ) -> None:
        """Wait until every rank has come here with the same value; raises what ``differ`` makes of who came with which.

        It raises nothing if there is no store that could say so.
        """
        if len(self._ranks) == 1:
            return
        self._statuses.note(f"{doing} before iteration", self.iteration_number, waits_for_all=True)
        self._num_meetings += 1
        # Counters of an earlier call in which the ranks differed must not count in this one.
        name = f"{kind}/{self.iteration_number}/{self._num_meetings}"
        try:
            described = self._compare_at(name, value, absent, self._timeout_s if timeout_s is None else timeout_s)
        except StoreLostError as lost:
            log.warning(
                f"{this_rank()}: it is not known whether every rank is {doing}: the store of the process group is gone"
                f" ({lost})"
            )
            return
        if described is not None:
            error = differ(described)
            self._statuses.raised(error)  # the others will wait for this rank
            raise error

    def _compare_at(self, name: str, value: str, absent: str, timeout_s: float) -> str | None:
        keys = {rank: f"{name}/{rank}" for rank in self._ranks}
        alike = self._register(name, value)
        for _ in pauses(timeout_s, longest_s=1.0):
            if self._store.add(f"{name}/registered", 0) == len(keys):
                break
        if self._store.add(alike, 0) == len(keys):
            return None

        def describe(found: dict[str, str]) -> str:
            return name_values({rank: found.get(key, absent) for rank, key in keys.items()})

        described = Gathering(self._store, name, list(keys.values())).summary(0.0, bool, describe)
        return f"{value} on rank {self._rank}, and others elsewhere" if described is None else described

    def _register(self, name: str, value: str) -> str:
        """Post a value; returns the counter of the ranks that have posted the same one."""
        self._store.post(f"{name}/{self._rank}", value)
        alike = f"{name}/{hashlib.sha256(value.encode()).hexdigest()[:16]}/registered"
        self._store.add(alike, 1)
        self._store.add(f"{name}/registered", 1)  # last: a rank that sees all of these also sees all additions above
        return alike

    def raised(self, error: Exception) -> None:
        """A forward raised: post the error for the ranks that will wait for this one."""
        self._statuses.raised(error)

    def report_failure(self, error: ReductionError, what: str = "") -> ReductionError:
        """See `RankStatuses.report_failure`."""
        return self._statuses.report_failure(error, what)


@contextmanager
def replicating(process_group: dist.ProcessGroup, class_name: str) -> Iterator[None]:
    """`DesyncMonitor.calling` for what the ranks exchange before they have one; errors say who has come."""
    call = f"ddp_compile() of {class_name}"
    store, ranks = GroupStore(process_group, "ddp_compile/calls/"), dist.get_process_group_ranks(process_group)
    statuses = RankStatuses(store, dist.get_rank(), ranks, f"in {call}")
    try:
        with Exchange(f"exchange of {call} between the ranks", statuses):
            yield
    except Exception as error:
        statuses.raised(error)
        raise
    statuses.note(f"{call} has returned", waits_for_all=True)


def post_uncaught_error(statuses: RankStatuses) -> Callable[[], None]:
    """Post the exception that ends the process, since nothing else notices exceptions of a backward.

    Returns a function that undoes it. ``statuses``, of this rank, are not kept alive.
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


def _compilation_notes(statuses: weakref.ref[RankStatuses]) -> tuple[Callable[[str], None], Callable[[], None]]:
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
