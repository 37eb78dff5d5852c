"""Streams on the CPU: the calls of `ddp_compile.runtime.comm.streams` to a device, reported to a `RaceDetector`."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from detector import RaceDetector, Stack
from torch import Tensor
from torch.nn import Parameter

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_STREAM = 0
#: Files that only pass on what others ask for.
_PASSED_THROUGH = {path.name for path in Path(__file__).parent.glob("*.py")} - {"programs.py"} | {"streams.py"}


class Site(NamedTuple):
    """A place in the sources that keeps streams in order."""

    what: str  #: "wait", "record", "used_by" or "wait for work"
    path: str
    line: int


@dataclass
class _Backward:
    """The engine's state in one thread."""

    forward: int
    accumulate: Callable[[Parameter], int]
    caller: int
    depth: int  # of the thread's streams when it began
    used: set[int]
    has_begun: bool = False


class SimulatedStreams:
    """A `Backend` of `ddp_compile.runtime.comm.streams` for the CPU.

    Inside `backward`, the current stream is the one that autograd's engine would set: an AccumulateGrad node runs on
    its own stream, any other node on the forward's, and the engine's final callbacks on the caller's. The order is the
    engine's too: the forward's stream waits for the caller's, AccumulateGrad's for the forward's, and the caller's for
    AccumulateGrad's. (``InputBuffer::add`` and ``GraphTask::exec_post_processing`` of torch 2.13, csrc/autograd. The
    former also tells the allocator which stream reads a gradient, see `Stage.watch`.)

    The waits, or records, of the place ``ignored`` do nothing, so that a race has to be found.
    """

    def __init__(self, detector: RaceDetector, ignored: Site | None = None) -> None:
        self.detector = detector
        self.sites: dict[Site, int] = {}  # how often each has been passed
        self.host_waits: list[tuple[str, Stack]] = []
        self.on_thread: Callable[[], AbstractContextManager[object]] = nullcontext
        self._ignored = ignored
        self._threads = threading.local()

    # `Backend`.

    def has_streams(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def is_capturing(self, device: torch.device) -> bool:
        return False

    def current(self, device: torch.device | None = None) -> int:
        stack, backward = self._stack(), self._backward()
        if backward is None or len(stack) > backward.depth:
            return stack[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return backward.caller
        if not backward.has_begun:  # the gradient of the loss is there
            backward.has_begun = True
            self.detector.wait_for_stream(backward.forward, backward.caller)
        if node.name() != "torch::autograd::AccumulateGrad":
            return backward.forward
        stream = backward.accumulate(node.variable)
        self.detector.wait_for_stream(stream, backward.forward)
        backward.used.add(stream)
        return stream

    def new(self, device: torch.device | None = None) -> int:
        return self.detector.new_stream()

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        self._stack().append(stream)
        try:
            yield
        finally:
            self._stack().pop()

    @contextmanager
    def in_thread(self, device: torch.device) -> Iterator[None]:
        with self.on_thread(), self.on(self.new()):
            yield

    def record(self, device: torch.device) -> int | None:
        return None if self.is_ignored("record") else self.detector.record(self.current(device))

    def wait(self, device: torch.device, event: int | None) -> None:
        if not self.is_ignored("wait") and event is not None:
            self.detector.wait(self.current(device), event)

    def used_by(self, tensor: Tensor, stream: int) -> None:
        if not self.is_ignored("used_by"):
            self.detector.used_by(tensor, stream)

    def reads_racing(self, device: torch.device, since: int | None) -> AbstractContextManager[None]:
        return nullcontext() if since is None else self.detector.tolerating(self.current(device), since)

    def launched(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self.detector.operator(name, self.current(), reads, writes)

    # The engine.

    @contextmanager
    def backward(self, forward: int, accumulate: Callable[[Parameter], int]) -> Iterator[Callable[[], None]]:
        """Inside, a backward runs in this thread, whose forward ran on ``forward``.

        ``accumulate`` returns the stream that a parameter's AccumulateGrad node was made on. Yields a function to call
        after the engine has run all nodes and before its final callbacks.
        """
        caller = self.current()
        self._threads.backward = backward = _Backward(forward, accumulate, caller, len(self._stack()), set())

        def join() -> None:
            for stream in backward.used:
                self.detector.wait_for_stream(caller, stream)

        try:
            yield join
        finally:
            self._threads.backward = None

    # Which places in the sources are passed.

    def is_ignored(self, what: str) -> bool:
        """Record the calling place in the sources; returns whether the call must do nothing."""
        for code, line in Stack.here().frames:
            path = Path(code.co_filename).resolve()
            if ROOT in path.parents and ".venv" not in path.parts and path.name not in _PASSED_THROUGH:
                if "tests" in path.relative_to(ROOT).parts:
                    return False
                site = Site(what, str(path.relative_to(ROOT)), line)
                self.sites[site] = self.sites.get(site, 0) + 1
                return site == self._ignored
        return False

    def _stack(self) -> list[int]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = [DEFAULT_STREAM]
        stack: list[int] = self._threads.stack
        return stack

    def _backward(self) -> _Backward | None:
        return getattr(self._threads, "backward", None)
