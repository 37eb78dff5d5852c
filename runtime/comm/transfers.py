"""Collectives and messages between ranks: starting them, waiting for them, and keeping them after their owner.

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
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.runtime.comm import streams
from ddp_compile.runtime.comm.exchange import Exchange

log = logging.getLogger(__name__)

#: How long the end of a process waits for ranks that have yet to receive its messages.
LONGEST_AT_END_S = 10.0


class Transfer:
    """Works that are waited for together, as one work would be.

    It waits for each work once: a second wait for a gloo message lasts until the timeout, and closes the connection
    (torch 2.13). So all waits, on any thread, are made here. No Python code runs between a wait and the record that it
    is done, since a signal handler, which may raise, could run there.

    Args:
        works: Works, or futures. Held, with their tensors, until they have been waited for.
        result: What `result` returns.
        then: Called once, after the waits, with what they have returned; replaces the result.
        failed: Makes the error that `wait` raises in place of another Exception.
    """

    def __init__(
        self,
        works: Sequence[dist.Work | torch.Future[Any]] = (),
        result: Sequence[Tensor] = (),
        then: Callable[[Sequence[Any]], list[Tensor]] | None = None,
        failed: Callable[[Exception], Exception] | None = None,
    ) -> None:
        self.works = works
        self._number = len(works)
        self._waits = map(methodcaller("wait"), works)
        self._values: list[Any] = []  # that waits have returned
        self._num_failed = 0
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._result = list(result)
        self._then, self._failed = then, failed

    def wait(self) -> None:
        """Return when all works are done, or will be before later work on the current stream.

        Raises:
            RuntimeError: One failed or timed out. Every further call raises this again.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                self._values.extend(self._waits)
            except BaseException as error:
                if self.is_done:  # a signal handler raised after all had arrived
                    raise
                self._num_failed += 1
                self._failure = error
                if isinstance(error, Exception) and self._failed is not None:
                    self._failure = self._failed(error)
                    raise self._failure from error
                raise
            finally:
                if self.is_done:
                    self.works = ()
            if self._then is not None:
                self._result = self._then(self._values)
                self._then = None
                self._values, self._number = [], 0  # they may hold memory

    def wait_for_others(self) -> None:
        """Return when no other rank will receive any more of these messages, whatever fails."""
        with self._lock:
            while not self.is_done:
                try:
                    self._values.extend(self._waits)
                except Exception as error:
                    self._num_failed += 1
                    self._failure = self._failure or error
                    log.info("a message that is no longer waited for has failed: %s", error)
            self.works = ()

    def result(self) -> list[Tensor]:
        """After `wait`: what has been transferred."""
        return self._result

    @property
    def is_done(self) -> bool:
        """Whether all works have been waited for."""
        return len(self._values) + self._num_failed == self._number


# What algorithms start. Each returns the work of what it has started, or a list of works.


def all_reduce(flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start adding up tensors of any shape, in place."""
    return torch_internals.started(dist.all_reduce(flat, group=group, async_op=True))


def all_to_all(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start sending row j of ``sent`` to rank j, whose row comes to ``received``, of the same shape."""
    return torch_internals.started(dist.all_to_all_single(received, sent, group=group, async_op=True))


def all_gather(gathered: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start sending ``own``, of shape (n,), to all ranks; ``gathered``, of shape (ranks * n,), gets all of them."""
    return torch_internals.all_gather_single(gathered, own, group)


def exchange(
    sent: Sequence[Tensor],
    received: Sequence[tuple[int, Sequence[Tensor]]],
    group: dist.ProcessGroup,
    tag: int,
    name: str,
) -> list[dist.Work]:
    """Start sending the same tensors to some ranks, and receiving from each of them.

    Args:
        sent: Goes to each of them.
        received: For each of them, its rank in the group and the tensors to receive into.
        tag: Has to be equal on both sides; NCCL ignores it.
        name: What the error says has failed, the algorithm's name for example.

    Raises:
        ReductionError: A rank is gone.
    """
    operations = [
        dist.P2POp(function, tensor, dist.get_global_rank(group, peer), group, tag)
        for peer, tensors in received
        for function, some in ((dist.isend, sent), (dist.irecv, tensors))
        for tensor in some
    ]
    with Exchange(name), torch_internals.unprofiled_messages():
        return dist.batch_isend_irecv(operations)


def objection_to_messages(name: str, process_group: dist.ProcessGroup, device: torch.device) -> str:
    """Why the ranks cannot send messages to each other, and the way out; empty if they can."""
    backend = torch_internals.backend_name(process_group, device)
    if backend == "gloo" and streams.has_streams(device):
        return (
            f"the {name} sends point-to-point messages, for which gloo takes CPU tensors only, but the parameters are"
            f" on {device}; use a process group of the device's own backend, or GradientAllReduce()"
        )
    return ""


def wait_for(works: Sequence[dist.Work | Transfer | None], name: str) -> None:
    """Wait for all works, in their order.

    Args:
        works: Those of None are passed over.
        name: What the error says has failed, the algorithm's name for example.

    Raises:
        ReductionError: One of them has failed.
    """
    with Exchange(name):
        for work in works:
            if work is not None:
                work.wait()


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
                    f"another rank has not received this one's messages within {LONGEST_AT_END_S:.0f} s; the process"
                    " ends without waiting"
                )
                return


_keeper: _Keeper | None = None
