"""Keeps a thread from writing parameters while others use them."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ddp_compile.algorithms import streams


class ParameterGate:
    """Lets a writer in only while no thread uses the parameters.

    The thread that trains is inside for a forward and its backward, for an optimizer's step, and for an evaluation;
    other threads may be inside for evaluations as well. Another forward, or one without a backward, finds the trainer
    inside already and does not wait.

    Code that writes parameters without entering could collide with the writer. Such writes change the parameters'
    versions, so they are noticed unless they go through ``.data``.

    Args:
        device: Of the parameters. If it has streams, these wait for each other as the threads do, since the host runs
            ahead of them.
        versions: Returns numbers that grow by one each with every write to the parameters.
        written_outside: Makes the error for a write while no thread was inside.
    """

    def __init__(
        self, device: torch.device, versions: Callable[[], list[int]], written_outside: Callable[[], Exception]
    ) -> None:
        self._changed = threading.Condition()
        self._inside: Counter[str] = Counter()
        self._device = device
        self._left: dict[streams.Stream, streams.Event] = {}  # when each stream last left after the last write
        self._written: streams.Event | None = None
        self._writer_waits = False
        self._versions = versions
        self._written_outside = written_outside
        self._versions_left: list[int] | None = None  # when the last thread left
        self._has_writer = False

    def writer_begins(self) -> None:
        """Expect a writer from now on. Writes outside before this call are allowed."""
        with self._changed:
            self._has_writer = True
            self._left_at_versions()

    def enter(self, why: str) -> None:
        """A thread starts using the parameters; it waits while they are being written."""
        with self._changed:
            if not self._inside.total():  # a trainer that comes back at once must not overtake the writer each time
                self._changed.wait_for(lambda: not self._writer_waits)
                self._refuse_writes_outside()
            self._inside[why] += 1
            self._await_write()

    def enter_once(self, why: str) -> None:
        """Enter unless already inside for this reason."""
        with self._changed:
            if not self._inside[why]:
                self.enter(why)
            else:
                self._await_write()  # this stream may be another one

    def leave(self, why: str) -> None:
        """The thread stops using them for this reason."""
        with self._changed:
            if self._inside[why]:
                self._inside[why] -= 1
                self._left_at_versions()
            self.note_reads()
            self._changed.notify_all()

    @contextmanager
    def inside(self, why: str) -> Iterator[None]:
        """Enter, and leave at the end."""
        self.enter(why)
        try:
            yield
        finally:
            self.leave(why)

    def note_reads(self) -> None:
        """The current stream has been given work that reads the parameters. The next write waits for it."""
        with self._changed:
            event = streams.record(self._device)
            self._left[event.stream] = event

    def writer_ends(self) -> None:
        """No step is under way: let the writer in at once, for the last time, and allow writes outside again."""
        with self._changed:
            self._has_writer, self._versions_left = False, None
            self._inside.clear()
            self.note_reads()
            self._changed.notify_all()

    def write(self, function: Callable[[], None], limit_s: float) -> bool:
        """Call a function that writes the parameters when no thread is inside; returns whether it was in time."""
        with self._changed:
            self._writer_waits = True
            try:
                if not self._changed.wait_for(lambda: not self._inside.total(), limit_s):
                    return False
                for event in self._left.values():
                    event.wait()
                self._left = {}
                self._refuse_writes_outside()
                before = self._versions()
                function()
                if self._has_writer:
                    self._versions_left = [version + 1 for version in before]
                self._written = streams.record(self._device)
                return True
            finally:
                self._writer_waits = False
                self._changed.notify_all()

    def _await_write(self) -> None:
        if self._written is not None:
            self._written.wait()

    def _left_at_versions(self) -> None:
        if self._has_writer and not self._inside.total():
            self._versions_left = self._versions()

    def _refuse_writes_outside(self) -> None:
        if self._versions_left is not None and self._versions() != self._versions_left:
            self._versions_left = None
            raise self._written_outside()
