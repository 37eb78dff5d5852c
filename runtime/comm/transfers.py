"""Messages under way between ranks, even after their owner is gone.

Note [Messages outlive their owners]
Messages must outlive their sender until they are received. A rank may finish, free its model and destroy its process
groups, or end, before another rank has received its messages. The garbage collector may run on any thread at any time,
even inside a collective that only this thread can complete, so it must not wait. Instead, a separate thread waits. It
keeps messages, and so their connections, for as long as the process group's timeout allows. Only the end of the process
waits for that thread. None of this is done if a wait holds up a stream and not the host, as with NCCL.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist

from ddp_compile.runtime.comm.streams import Event

log = logging.getLogger(__name__)

#: How long the end of a process waits for ranks that have yet to receive its messages.
LONGEST_AT_END_S = 10.0


class MadeOfWorks:
    """What is done when all of its works are."""

    #: Those that may not have been waited for; they hold their tensors. None if they are not known yet.
    works: Sequence[dist.Work | Event] | None


class MadeOfFuture:
    """What is done when its future is."""

    future: torch.Future[Any] | None  #: None after it has been waited for


class Transfer(MadeOfWorks):
    """A group of works that are waited for together.

    A gloo message may be waited for only once: a second wait lasts until the timeout, and closes the connection (torch
    2.13). So all waits, on any thread, are made here. No Python code runs between a wait and the record that it is
    done, since a signal handler, which may raise, could run there.
    """

    works: Sequence[dist.Work]

    def __init__(self, works: Sequence[dist.Work] = ()) -> None:
        self.works = works
        self._number = len(works)
        self._waits = map(methodcaller("wait"), works)
        self._done: list[bool] = []
        self._num_failed = 0
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when all messages have arrived, or will have before later work on the current stream.

        Raises:
            RuntimeError: One failed or timed out. Every further call raises this again.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                self._done.extend(self._waits)
            except BaseException as error:
                if not self.is_done:  # otherwise a handler raised after all had arrived
                    self._num_failed += 1
                    self._failure = error
                raise
            finally:
                if self.is_done:
                    self.works = ()

    def wait_for_others(self) -> None:
        """Return when no other rank will receive any more of these messages, whatever fails."""
        with self._lock:
            while not self.is_done:
                try:
                    self._done.extend(self._waits)
                except Exception as error:
                    self._num_failed += 1
                    self._failure = self._failure or error
                    log.info("a message that is no longer waited for has failed: %s", error)
            self.works = ()

    @property
    def is_done(self) -> bool:
        """Whether all has been waited for."""
        return len(self._done) + self._num_failed == self._number


def keep_after(owner: object, finish: Callable[[], None]) -> None:
    """Let other ranks receive an object's messages even if it has been collected or the process ends.

    Args:
        owner: The owner of the messages.
        finish: Waits for them, with `Transfer.wait_for_others`. The keeper's thread calls it, perhaps more than once.
            It holds the messages, and must not refer to ``owner``, which would then live as long as the process.
    """
    global _keeper  # one for each process: a fork has no threads
    if _keeper is None or _keeper.pid != os.getpid():
        _keeper = _Keeper()
    _keeper.keep_after(owner, finish)


class _Kept:
    """The messages of one owner."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish = finish
        self.is_finished = threading.Event()


class _Keeper:
    """The thread that waits."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._kept: set[_Kept] = set()  # of all owners, alive or not
        self._to_finish: queue.SimpleQueue[_Kept] = queue.SimpleQueue()  # its put() may be called by the collector
        threading.Thread(target=self._finish_in_turn, name="ddp_compile_keeper", daemon=True).start()
        # Not atexit, which children of multiprocessing skip. It does nothing in a fork.
        Finalize(None, self._process_ends, exitpriority=100)

    def keep_after(self, owner: object, finish: Callable[[], None]) -> None:
        kept = _Kept(finish)
        self._kept.add(kept)
        weakref.finalize(owner, self._is_gone, kept).atexit = False

    def _is_gone(self, kept: _Kept) -> None:
        if self.pid == os.getpid():
            self._to_finish.put(kept)

    def _finish_in_turn(self) -> None:
        while True:
            kept = self._to_finish.get()
            try:
                kept.finish()
            except Exception:
                log.exception("failed to wait for the messages of a rank")
            self._kept.discard(kept)
            kept.is_finished.set()
            del kept  # it may be long until the next one comes

    def _process_ends(self) -> None:
        deadline = time.monotonic() + LONGEST_AT_END_S
        waiting = list(self._kept)
        for kept in waiting:
            self._to_finish.put(kept)
        for kept in waiting:
            if not kept.is_finished.wait(max(0.0, deadline - time.monotonic())):
                log.warning(
                    "another rank has not received this one's messages within %.0f s; the process ends without waiting",
                    LONGEST_AT_END_S,
                )
                return


_keeper: _Keeper | None = None
