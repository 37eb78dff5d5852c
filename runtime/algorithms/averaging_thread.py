"""The thread that averages parameters while another one trains them.

Note [Ranks that end]
No rank waits for another, so a rank that is gone is missed by nobody. The threads would go on answering for it, and the
others would average with parameters that nobody trains any more. So the threads tell each other how each rank stands,
at least once in `_LONGEST_SILENCE_S`, each to each: a killed process closes its connections, which every other rank
sees at once. A rank whose process lives says itself that it has failed, as soon as its main thread has ended.

How a main thread has ended, Python tells nobody once it is over: ``sys.last_value`` knows no SystemExit, and exit
functions get no status. But the frame that the thread began with stays readable for whoever holds it. If the last
instruction that it came to is a return, the script was read to its end. Otherwise an exception has left it; whether
that was ``sys.exit(0)`` or ``sys.exit(1)`` cannot be told, so both are failures.
"""

from __future__ import annotations

import opcode
import sys
import threading
import time
import weakref
from enum import IntEnum, auto
from multiprocessing.util import Finalize
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from ddp_compile.runtime import streams

#: How long the thread waits for the trainer to let the parameters be, before it tells the others that it waits.
_PATIENCE_S = 0.2
#: How long the ranks say nothing to each other, however long the interval is.
_LONGEST_SILENCE_S = 1.0
#: How long a process that ends by an error waits for its thread, which may not be in the middle of torch then.
_LAST_WAIT_S = 5.0


class Standing(IntEnum):
    """What a rank tells the others of itself."""

    TRAINS = auto()
    STOPS = auto()  #: it has asked for the end, or its script has come to its own
    HAS_FAILED = auto()  #: its process ends by an exception or by ``sys.exit``
    HAS_LEFT = auto()  #: it takes part no more, and its process goes on
    HAS_NO_MODEL = auto()  #: the model was collected


#: What a rank has done that takes no part in another round.
HOW_GONE = {
    Standing.HAS_FAILED: "has ended by an exception or by sys.exit()",
    Standing.HAS_LEFT: "has left the averaging after an error",
    Standing.HAS_NO_MODEL: "has let its model go",
}


class Rounds(Protocol):
    """What the thread goes through."""

    @property
    def has_pending(self) -> bool:
        """Whether a round waits for the trainer to leave the parameters."""

    def round(self, since: streams.Event) -> None:
        """Add up the ranks' copies of what the parameters were then, or have become."""

    def apply_within(self, limit_s: float) -> None:
        """Take the average as soon as the trainer lets the parameters be, or not yet."""


class AveragingThread:
    """Goes from round to round until all ranks have asked for the end, or one has failed; see Note [Ranks that end].

    It does not keep the algorithm alive while it waits or sleeps.

    Before each round the ranks tell each other how they stand, and whether one still has to take the average before, or
    its interval is not over; then there is no round, so that a rank that computes for long holds up the averages but
    fails no collective.

    Args:
        algorithm: Has what a round is.
        group: Nothing else is sent over it meanwhile.
        device: Of the parameters.
        interval_s: How long it sleeps between two rounds.
        limit_s: How long `stop` waits for the other ranks.
    """

    def __init__(
        self,
        algorithm: Rounds,
        group: dist.ProcessGroup,
        device: torch.device,
        interval_s: float,
        limit_s: float,
    ) -> None:
        self.failure: Exception | None = None  #: what a collective raised
        self.gone: dict[int, str] = {}  #: how, by the global rank; without them there are no more rounds
        self._algorithm = weakref.ref(algorithm)
        self._group = group
        self._device = device
        self._interval_s = interval_s
        self._limit_s = limit_s
        self._begins = streams.record(device)  # what the thread has to find done
        self._stops = threading.Event()
        self._has_ended: Standing | None = None  # this rank, by an error
        self._ranks = dist.get_process_group_ranks(group)
        self._not_stopping = self._ranks
        self._first_frame = _first_frame_of_main_thread()
        self._thread = threading.Thread(target=self._run, name="ddp_compile model average", daemon=True)
        self._thread.start()
        # A thread that is still in torch when the interpreter goes ends the process by SIGABRT. Not atexit, which
        # children of multiprocessing pass over. It comes after the monitor has posted the error that ends the process.
        self._at_exit = Finalize(None, self._process_ends, exitpriority=0)

    def stop(self) -> list[int]:
        """Ask for the end, and return when all ranks have, or one has failed.

        Returns:
            The global ranks that have not asked for it in time; the thread ends then, and leaves the others alone.
        """
        self._stops.set()
        self._thread.join(self._limit_s)
        if not self._thread.is_alive():
            self._at_exit.cancel()
            return []  # and what it has written is there: it has heard of all ranks once more, on the host
        self.end_alone(Standing.HAS_LEFT)
        return self._not_stopping

    def end_alone(self, standing: Standing) -> None:
        """Begin no further round; tell the others why, without waiting for them."""
        self._has_ended = standing
        self._stops.set()

    def _process_ends(self) -> None:
        algorithm = self._algorithm()  # alive until the others need no more of it
        if threading.main_thread().is_alive():  # of a child of multiprocessing, which handles what has ended it
            error = sys.exception()
            has_failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
        else:
            has_failed = not _has_returned(self._first_frame)
        if not has_failed:  # the script has ended without abort(): go on until the others' have
            self._stops.set()
            self._thread.join(self._limit_s)
        self.end_alone(Standing.HAS_FAILED if has_failed else Standing.HAS_LEFT)
        self._thread.join(_LAST_WAIT_S)
        del algorithm

    def _run(self) -> None:
        try:
            with torch.no_grad():
                streams.run_on_own_stream(self._device, self._go_round)
        except Exception as error:  # raised where the trainer is
            self.failure = error

    def _go_round(self) -> None:
        self._begins.wait()
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
            if self.gone or not self._not_stopping:
                return
            algorithm = self._algorithm()
            if algorithm is None:
                continue
            if not no_round:
                algorithm.round(self._begins)
                due_at = time.monotonic() + self._interval_s
            algorithm.apply_within(_PATIENCE_S)
            if not algorithm.has_pending:
                del algorithm
                self._stops.wait(min(_LONGEST_SILENCE_S, max(0.0, due_at - time.monotonic())))

    def _standing(self, algorithm: Rounds | None) -> Standing:
        if self._has_ended is not None:
            return self._has_ended
        if not threading.main_thread().is_alive():  # exit functions may take long before it is the turn of ours
            return Standing.STOPS if _has_returned(self._first_frame) else Standing.HAS_FAILED
        if algorithm is None:
            return Standing.HAS_NO_MODEL
        return Standing.STOPS if self._stops.is_set() else Standing.TRAINS

    def _tell(self, standing: Standing, holds_up: bool) -> tuple[dict[int, Standing], bool]:
        """Tell every other rank, and hear of each by its global rank, and whether any holds the next round up."""
        said = torch.tensor([[standing, holds_up]] * self._group.size(), dtype=torch.int32, device=self._device)
        heard = torch.empty_like(said)
        dist.all_to_all_single(heard, said, group=self._group)
        standings, holding = heard.T.tolist()
        return dict(zip(self._ranks, map(Standing, standings), strict=True)), any(holding)


def _first_frame_of_main_thread() -> FrameType:
    frame = sys._current_frames().get(threading.main_thread().ident or 0) or sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_returned(frame: FrameType) -> bool:
    """Whether a frame that has ended did so by a return, and not by an exception."""
    return opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")
