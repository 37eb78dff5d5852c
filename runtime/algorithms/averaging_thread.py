"""The thread that averages parameters while another one trains them."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from typing import Protocol

import torch
import torch.distributed as dist

from ddp_compile.runtime import streams

#: How long the thread waits for the trainer to let the parameters be, before it tells the others that it waits.
_PATIENCE_S = 0.2
#: How long a process that ends by an error waits for its thread, which may not be in the middle of torch then.
_LAST_WAIT_S = 5.0


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
    """Goes from round to round until all ranks have asked for the end.

    It does not keep the algorithm alive while it waits or sleeps.

    Before each round the ranks tell each other who wants to stop, and whether one still has to take the average before;
    then there is no round, so that a rank that computes for long holds up the averages but fails no collective.

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
        self.failure: Exception | None = None
        self._algorithm = weakref.ref(algorithm)
        self._group = group
        self._device = device
        self._interval_s = interval_s
        self._limit_s = limit_s
        self._begins = streams.record(device)  # what the thread has to find done
        self._stops = threading.Event()
        self._ends_alone = False
        self._not_stopping = list(range(group.size()))  # ranks in the group
        self._thread = threading.Thread(target=self._run, name="ddp_compile model average", daemon=True)
        self._thread.start()
        # A thread that is still in torch when the interpreter goes ends the process by SIGABRT.
        atexit.register(self._at_exit)

    def stop(self) -> list[int]:
        """Ask for the end, and return when all ranks have.

        Returns:
            The global ranks that have not asked for it in time; the thread ends then, and leaves the others alone.
        """
        self._stops.set()
        self._thread.join(self._limit_s)
        atexit.unregister(self._at_exit)
        if not self._thread.is_alive():
            return []  # and what it has written is there: it has asked all ranks once more, and read their answers
        self.end_alone()
        return [dist.get_global_rank(self._group, rank) for rank in self._not_stopping]

    def end_alone(self) -> None:
        """Begin no further round."""
        self._ends_alone = True
        self._stops.set()

    def _at_exit(self) -> None:
        has_failed = getattr(sys, "last_value", None) is not None
        if not has_failed:  # the script has ended without abort(): go on until the others' have
            self._stops.set()
            self._thread.join(self._limit_s)
        self.end_alone()
        self._thread.join(_LAST_WAIT_S)

    def _run(self) -> None:
        try:
            with torch.no_grad():
                streams.run_on_own_stream(self._device, self._go_round)
        except Exception as error:  # raised where the trainer is
            self.failure = error

    def _go_round(self) -> None:
        self._begins.wait()
        while not self._ends_alone:
            algorithm = self._algorithm()
            if algorithm is None:
                return
            is_waiting = algorithm.has_pending
            del algorithm
            self._not_stopping, someone_waits = self._ask_all(is_waiting)
            if not self._not_stopping:
                return
            algorithm = self._algorithm()
            if algorithm is None:
                return
            if not someone_waits:
                algorithm.round(self._begins)
            algorithm.apply_within(_PATIENCE_S)
            has_averaged = not algorithm.has_pending
            del algorithm
            if has_averaged:
                self._stops.wait(self._interval_s)

    def _ask_all(self, is_waiting: bool) -> tuple[list[int], bool]:
        """Which ranks do not want to stop, and whether any has still to take an average."""
        said = torch.zeros(self._group.size() + 1, dtype=torch.int32, device=self._device)
        said[self._group.rank()] = self._stops.is_set()
        said[-1] = is_waiting
        dist.all_reduce(said, group=self._group)
        *stops, waiting = said.tolist()
        return [rank for rank, stop in enumerate(stops) if not stop], bool(waiting)
