"""The thread that averages parameters while the main thread trains them.

Note [Ranks that end]
No rank waits for another, so no rank would miss one whose main thread has ended. Its averaging thread would go on, and
the others would average with parameters that are no longer trained. So the threads exchange the ranks' standings, all
to all, at least every `_LONGEST_SILENCE_S` seconds. A killed process closes its connections, which every other rank
notices at once. In a process that still runs, the averaging thread reports the end as soon as the main thread has
ended, however it ended: Python does not say, and a script that ends without ``abort()`` leaves ranks with different
parameters, which is an error too.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from enum import IntEnum, auto
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddp_compile.algorithms import Exchange, group_timeout, streams
from ddp_compile.errors import this_rank

if TYPE_CHECKING:
    from ddp_compile.runtime.algorithms.async_model_average import AsyncModelAverageAlgorithm

log = logging.getLogger(__name__)

#: How long the thread waits for the training thread to leave the parameters before it tells the others that it waits.
_PATIENCE_S = 0.2
#: The longest time between two messages, however long the interval is.
_LONGEST_SILENCE_S = 1.0
#: How long the end of a process waits for its thread to leave torch.
_LAST_WAIT_S = 5.0


class Standing(IntEnum):
    """The state that a rank reports to the others."""

    TRAINS = auto()
    STOPS = auto()  #: it has asked to stop
    HAS_ENDED = auto()  #: its process is ending, and it has not asked to stop
    HAS_LEFT = auto()  #: it has left the averaging, but its process runs on
    HAS_NO_MODEL = auto()  #: its model was garbage-collected


#: How errors describe a rank that has left.
HOW_GONE = {
    Standing.HAS_ENDED: "has reached the end of its process",
    Standing.HAS_LEFT: "has left the averaging after an error",
    Standing.HAS_NO_MODEL: "has freed its model",
}


class AveragingThread:
    """Runs rounds until all ranks have asked to stop, or one has failed; see Note [Ranks that end].

    It does not keep the algorithm alive while it waits or sleeps. While it runs, nothing else sends over ``hosts``, the
    ranks' `host_group`. ``interval_s`` is from the end of one round to the start of the next.

    Before each round the ranks exchange their standings, and whether they hold up the round. A rank holds it up until
    it has applied the last average and its interval is over; there is no round before. So a rank that computes for long
    delays the averages, but no collective times out.
    """

    def __init__(
        self, algorithm: AsyncModelAverageAlgorithm, hosts: tuple[Any, torch.device], interval_s: float
    ) -> None:
        self.failure: Exception | None = None  #: that the thread has raised
        self.gone: dict[int, str] = {}  #: why ranks have left, by global rank; one such rank ends the rounds
        self._algorithm, self._name = weakref.ref(algorithm), algorithm.name
        self._hosts = hosts
        self._ranks = dist.get_process_group_ranks(algorithm.group)
        self._device = algorithm.device
        self._interval_s = interval_s
        self._limit_s = group_timeout(algorithm.group, algorithm.device).total_seconds()  # of waits for other ranks
        self._begins = streams.record(self._device)  # the thread's stream waits for it first
        self._ended: streams.Event | None = None  # recorded when the thread has ended
        self._stops = threading.Event()
        self._has_ended: Standing | None = None  # why this rank has left
        self._not_stopping = self._ranks
        self._thread = threading.Thread(target=self._run, name="ddp_compile model average", daemon=True)
        self._thread.start()
        # A thread that is still in torch when the interpreter exits aborts the process. Not atexit, which children of
        # multiprocessing skip. By its priority it runs after the monitor has posted the error that ends the process.
        self._at_exit = Finalize(None, self._process_ends, exitpriority=0)

    def stop(self) -> list[int]:
        """Ask for the end, and wait for the others; returns the global ranks that have not asked for it in time."""
        self._stops.set()
        self._thread.join(self._limit_s)
        if not self._thread.is_alive():
            self._at_exit.cancel()
            if self._ended is not None:
                self._ended.wait()
            return []
        self.end_alone(Standing.HAS_LEFT)
        return self._not_stopping

    def end_alone(self, standing: Standing) -> None:
        """Begin no more rounds, and tell the others why, without waiting for them."""
        self._has_ended = standing
        self._stops.set()

    def _process_ends(self) -> None:
        if self._has_ended is None and self.failure is None and not self.gone:
            log.warning(
                f"{this_rank()}: the process ends while parameters are averaged, without model.comm_algorithm.abort(),"
                " so the ranks' parameters differ; the other ranks will raise. Call it on every rank after the last"
                " step"
            )
        self.end_alone(Standing.HAS_ENDED)
        self._thread.join(_LAST_WAIT_S)

    def _run(self) -> None:
        try:
            with torch.no_grad(), Exchange(self._name):
                streams.run_on_own_stream(self._device, self._go_round_until_the_end)
        except Exception as error:  # the training thread raises it
            self.failure = error

    def _go_round_until_the_end(self) -> None:
        self._begins.wait()
        try:
            self._go_round()
        finally:
            self._ended = streams.record(self._device)

    def _go_round(self) -> None:
        due_at = time.monotonic()
        while True:
            algorithm = self._algorithm()
            standing = self._standing(algorithm)
            is_due = standing is Standing.STOPS or time.monotonic() >= due_at
            holds_up = not is_due or (algorithm is not None and algorithm.has_pending)
            del algorithm
            standings, no_round = self._tell(standing, holds_up)
            if standing in HOW_GONE:
                return
            self.gone = {rank: HOW_GONE[theirs] for rank, theirs in standings.items() if theirs in HOW_GONE}
            self._not_stopping = [rank for rank, theirs in standings.items() if theirs is Standing.TRAINS]
            algorithm = self._algorithm()
            if self.gone:
                return
            if algorithm is None:
                continue
            if not self._not_stopping:
                algorithm.apply_within(self._limit_s)  # the training thread waits in `stop`
                return
            if not no_round:
                algorithm.round(self._begins)
                due_at = time.monotonic() + self._interval_s
            algorithm.apply_within(_PATIENCE_S)
            if not algorithm.has_pending:
                del algorithm
                self._stops.wait(min(_LONGEST_SILENCE_S, max(0.0, due_at - time.monotonic())))

    def _standing(self, algorithm: AsyncModelAverageAlgorithm | None) -> Standing:
        if self._has_ended is not None:
            return self._has_ended
        if not threading.main_thread().is_alive():  # other exit functions may run for long before ours
            return Standing.HAS_ENDED
        if algorithm is None:
            return Standing.HAS_NO_MODEL
        return Standing.STOPS if self._stops.is_set() else Standing.TRAINS

    def _tell(self, standing: Standing, holds_up: bool) -> tuple[dict[int, Standing], bool]:
        """Exchange standings; returns those of all ranks by global rank, and whether any holds up the next round."""
        group, device = self._hosts
        said = torch.tensor([standing, holds_up] * len(self._ranks), dtype=torch.uint8, device=device)
        received = torch.empty_like(said)
        group.alltoall_base(received, said, [], []).wait()
        heard = received.tolist()
        return dict(zip(self._ranks, map(Standing, heard[::2]), strict=True)), any(heard[1::2])
