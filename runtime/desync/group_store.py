"""The store of a process group, with a limit on every wait.

Note [Stores that do not answer]
A training step needs no store, so a store that is slow, frozen or gone must never stop one. torch's TCPStore waits
without a limit, whatever its timeout is, if its server was stopped or the server's machine is gone (seen on torch 2.13
with a stopped server process). So every question that waits for an answer runs on a thread of its own. If it takes too
long, the store's connection is shut down; the wait then fails, the thread ends, and the store is not asked again. No
thread may remain in the wait. If its answer came while the interpreter ends, the thread would exit through C++ frames
that must not be unwound, and the process would abort ("terminate called without an active exception"). Only TCPStore
has a connection to shut down. A thread that waits in another store, for the lock of a FileStore for example, is left
there. ``set`` waits for no answer and runs in the calling thread. It blocks only when the socket's buffer is full,
about 30,000 posts after the server has stopped answering. The questions of `monitor` notice that long before.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from ddp_compile import torch_internals
from ddp_compile.errors import this_rank

log = logging.getLogger(__name__)

#: How long a store may take to answer. A healthy one takes less than a millisecond.
ANSWER_LIMIT_S = 5.0

Answer = TypeVar("Answer")


class StoreLostError(Exception):
    """The store did not answer, or its connection broke. The runtime always catches this and continues without it."""


class GroupStore:
    """A separate connection to the store of a process group. If the group has no store, every question fails.

    It is separate because another thread may hold the group's own connection for minutes while it waits for a key.
    ``prefix`` is prepended to every key.
    """

    def __init__(self, process_group: dist.ProcessGroup, prefix: str) -> None:
        self._prefix = prefix
        self._store: Any = None
        self.lost: str | None = None  #: why it is no longer asked
        self.ends_here = False  #: whether the store ends with this process although other processes use it
        if process_group.size() == 1:
            self.lost = "there is no other rank"
            return
        shared: Any = process_group.get_group_store()
        self.ends_here = torch_internals.holds_server(shared)
        try:
            self._store = None if shared is None else shared.clone()
        except RuntimeError as error:  # no connection, or a store written in Python
            self.lost = _first_line(error)
        if shared is None:  # a process group written in Python
            self.lost = "the process group has none"
        if self.lost is not None:
            log.info("%s: the process group has no store to post to: %s", this_rank(), self.lost)

    @property
    def only_grows(self) -> bool:
        """Whether every post stays on a disk forever, as in a FileStore."""
        return self._store is not None and not self._store.has_extended_api()

    def post(self, key: str, value: str) -> None:
        """Set a key, if there is a store, without waiting for an answer."""
        if self.lost is None:
            try:
                self._store.set(self._prefix + key, value)
            except RuntimeError as error:
                self._lose(_first_line(error))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; returns its new value. Raises StoreLostError."""
        return self.ask(lambda: self._store.add(self._prefix + key, amount))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys, of which some may not exist, unless that takes memory too. Raises StoreLostError."""
        if not self.only_grows:
            self.ask(lambda: [self._store.delete_key(self._prefix + key) for key in keys])

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """The values of the keys that exist. Raises StoreLostError."""
        return self.ask(lambda: self._values(keys))

    def ask(self, question: Callable[[], Answer], limit_s: float = ANSWER_LIMIT_S) -> Answer:
        """Run a function that waits for the store, see Note [Stores that do not answer]; raises StoreLostError."""
        if self.lost is not None:
            raise StoreLostError(self.lost)
        answers: list[Answer] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(question())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="ddp_compile_store", daemon=True)
        thread.start()
        try:
            thread.join(limit_s)
            reason = _first_line(errors[0]) if errors else f"no answer within {limit_s:.0f} s"
        except BaseException:  # Ctrl-C
            reason = "interrupted while it was asked"
            raise
        finally:
            if not answers:
                self._lose(reason)
                if torch_internals.shut_down_connection(self._store):
                    thread.join(ANSWER_LIMIT_S)
        if not answers:
            raise StoreLostError(self.lost)
        return answers[0]

    def _values(self, keys: Sequence[str]) -> dict[str, str]:
        # All at once if none is missing: with many ranks, two answers instead of thousands.
        names = [self._prefix + key for key in keys]
        if not self.only_grows and self._store.check(names):
            return {key: value.decode() for key, value in zip(keys, self._store.multi_get(names), strict=True)}
        there = [key for key in keys if self._store.check([self._prefix + key])]
        return {key: self._store.get(self._prefix + key).decode() for key in there}

    def _lose(self, reason: str) -> None:
        self.lost = reason
        log.info("the store of the process group is no longer asked: %s", reason)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
