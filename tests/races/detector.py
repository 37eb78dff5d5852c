"""Finds accesses to memory that no wait orders, in a program that ran on the CPU.

Operators run immediately here, one after the other. For each one, the detector records what would happen on an
accelerator: the stream that it runs on, its reads and writes, and which streams have waited for which. Two accesses to
the same bytes, at least one of which writes, are a race unless a chain of waits leads from the first to the second. So
a race is found whether or not it would have changed a result.

Memory is known by address: two tensors on the same bytes conflict, whichever storages they have. When a storage is
freed, its allocator may hand the bytes out again to the next operator on the stream that allocated them. That counts as
a write there, after all streams that the allocator was told of (``record_stream``).

Not seen: kernels themselves, the order in which inductor's kernels are launched, CUDA graphs, NCCL's needs on a device,
and the engine's threads.
"""

from __future__ import annotations

import bisect
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.cuda._sanitizer import StreamSynchronizations
from torch.multiprocessing.reductions import StorageWeakRef

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_DEPTH = 40


@dataclass(frozen=True)
class Stack:
    frames: tuple[tuple[CodeType, int], ...]

    @classmethod
    def here(cls) -> Stack:
        frames = []
        frame = sys._getframe(1)
        while frame is not None and len(frames) < _DEPTH:
            frames.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back  # type: ignore[assignment]
        return cls(tuple(frames))

    def ours(self) -> list[str]:
        """The calls in the project's sources and in the tests' programs."""
        found = []
        for code, line in self.frames:
            path = Path(code.co_filename)
            if _ROOT in path.parents and ".venv" not in path.parts and path.name not in _HARNESS:
                found.append(f"{path.relative_to(_ROOT)}:{line} in {code.co_name}")
        return found


_HARNESS = frozenset({"detector.py", "simulated_streams.py", "simulated_group.py", "observer.py"})


@dataclass(frozen=True)
class Access:
    """One operator, or one transfer, at some bytes."""

    writes: bool
    begin: int
    end: int
    stream: int
    number: int  # of the operator, counted over all streams
    operator: str
    tensor: str
    stack: Stack
    may_race: bool = False  # a read for which the values of before and after a write are as good

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        where = "\n      ".join(self.stack.ours()[:8]) or "outside of the project"
        return f"{self.operator} {verb} {self.tensor} on stream {self.stream}\n      {where}"


@dataclass(frozen=True)
class Race:
    """Two accesses without an order."""

    first: Access
    second: Access
    is_reuse: bool = False

    def __str__(self) -> str:
        second = f"memory is handed out again on stream {self.second.stream}" if self.is_reuse else str(self.second)
        return f"no wait leads from\n    {self.first}\n  to\n    {second}"


@dataclass
class _Block:
    """The memory of one storage, from its allocation until it is freed."""

    begin: int
    end: int
    allocated_on: int | None  # None if it was allocated before anything was recorded
    weak: StorageWeakRef
    used_by: set[int] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


class RaceDetector:
    """The accesses and waits of the streams of one process."""

    def __init__(self) -> None:
        self.races: list[Race | str] = []
        self._lock = threading.RLock()
        self._clocks = StreamSynchronizations()
        self._number = 0
        self._num_events = 0
        self._num_streams = 0
        self._blocks: list[_Block] = []  # by address
        self._begins: list[int] = []
        self._freed: dict[int, list[tuple[_Block, list[int]]]] = {}  # by the stream that may use them again
        self._host_memory: list[tuple[int, int, StorageWeakRef]] = []
        self._tolerated = threading.local()

    # Streams and events.

    def new_stream(self) -> int:
        with self._lock:
            self._num_streams += 1
            self._clocks.create_stream(self._num_streams)
            return self._num_streams

    def record(self, stream: int) -> int:
        with self._lock:
            self._num_events += 1
            self._clocks.create_event(self._num_events)
            self._clocks.record_state(self._num_events, stream)
            return self._num_events

    def wait(self, stream: int, event: int) -> None:
        with self._lock:
            self._clocks.stream_wait_for_event(stream, event)

    def wait_for_stream(self, stream: int, other: int) -> None:
        if stream != other:
            self.wait(stream, self.record(other))

    def host_waits(self, stream: int) -> None:
        """The host waits: all that it starts later comes after the stream's work so far."""
        with self._lock:
            self._clocks.all_streams_wait_for_stream(stream)

    @contextmanager
    def tolerating(self, stream: int, since: int) -> Iterator[None]:
        """Inside, reads of this thread may race with writes after an event, for which its stream has waited."""
        with self._lock:
            now, then = self._clocks.current_sync_states[stream], self._clocks.recorded_sync_states[since]
            if any(now.get(other, -1) < number for other, number in then.items()):
                where = "\n      ".join(Stack.here().ours()[:8])
                self.races.append(
                    f"stream {stream} has not waited for what may be read while it is written\n      {where}"
                )
        self._tolerated.since = since
        try:
            yield
        finally:
            self._tolerated.since = None

    # Memory.

    def is_host_memory(self, tensor: Tensor) -> bool:
        address = _extent(tensor)[0]
        return any(begin <= address < end and not weak.expired() for begin, end, weak in self._host_memory)

    def note_host_memory(self, tensor: Tensor) -> None:
        with self._lock:
            storage = tensor.untyped_storage()
            begin = storage.data_ptr()
            self._host_memory = [each for each in self._host_memory if not each[2].expired()]
            self._host_memory.append((begin, begin + storage.nbytes(), StorageWeakRef(storage)))

    def note_device_memory(self, tensor: Tensor) -> None:
        """A group of the device sends this tensor, so the values that the host made have been copied there."""
        with self._lock:
            address = _extent(tensor)[0]
            self._host_memory = [each for each in self._host_memory if not each[0] <= address < each[1]]

    def used_by(self, tensor: Tensor, stream: int) -> None:
        with self._lock:
            self._block_of(tensor).used_by.add(stream)

    def operator(self, name: str, stream: int, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """An operator has been started on a stream; it has allocated those that it writes and are new."""
        with self._lock:
            self._number += 1
            self._clocks.update_seq_num(stream, self._number)
            stack = Stack.here()
            for tensors, is_write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    if _has_memory(tensor) and not self.is_host_memory(tensor):
                        self._note(tensor, is_write, name, stream, stack)

    def allocated(self, tensors: Sequence[Tensor], stream: int) -> None:
        """An operator on a stream has returned tensors: those on new memory are allocated there."""
        with self._lock:
            new = [tensor for tensor in tensors if _has_memory(tensor) and not self._is_known(tensor)]
            if not new:
                return
            self._collect()
            for tensor in new:
                self._add(tensor, stream)
            self._number += 1
            self._clocks.update_seq_num(stream, self._number)
            for block, used_until in self._freed.pop(stream, []):
                self._hand_out(block, used_until, stream)

    def _note(self, tensor: Tensor, is_write: bool, name: str, stream: int, stack: Stack) -> None:
        block = self._block_of(tensor)
        begin, end = _extent(tensor)
        shown = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        since = getattr(self._tolerated, "since", None)
        access = Access(is_write, begin, end, stream, self._number, name, shown, stack, since is not None)
        kept = []
        for other in block.accesses:
            overlaps = other.begin < end and begin < other.end
            is_ordered = other.stream == stream or self._clocks.is_ordered_after(stream, other.number, other.stream)
            if overlaps and (is_write or other.writes) and not is_ordered and not self._may_race(other, access, since):
                self._report(Race(other, access))
            is_covered = begin <= other.begin and other.end <= end and is_ordered
            if not is_covered or (other.writes and not is_write):
                kept.append(other)
        block.accesses = [*kept, access]

    def _may_race(self, first: Access, second: Access, since: int | None) -> bool:
        if second.writes:
            return first.may_race and not first.writes
        return since is not None and not self._is_before(first, since)

    def _is_before(self, access: Access, event: int) -> bool:
        return access.number <= self._clocks.recorded_sync_states[event].get(access.stream, -1)

    def _report(self, race: Race) -> None:
        places = race.first.stack.ours()[:2], race.second.stack.ours()[:2]
        known = [each for each in self.races if isinstance(each, Race)]
        if all((r.first.stack.ours()[:2], r.second.stack.ours()[:2]) != places for r in known):
            self.races.append(race)

    # Blocks.

    def _index(self, address: int) -> int:
        return bisect.bisect_right(self._begins, address) - 1

    def _find(self, tensor: Tensor) -> _Block | None:
        address = _extent(tensor)[0]
        index = self._index(address)
        if index >= 0 and address < self._blocks[index].end and not self._blocks[index].weak.expired():
            return self._blocks[index]
        return None

    def _is_known(self, tensor: Tensor) -> bool:
        return self._find(tensor) is not None or self.is_host_memory(tensor)

    def _block_of(self, tensor: Tensor) -> _Block:
        return self._find(tensor) or self._add(tensor, None)

    def _add(self, tensor: Tensor, stream: int | None) -> _Block:
        storage = tensor.untyped_storage()
        begin, end = storage.data_ptr(), storage.data_ptr() + max(1, storage.nbytes())
        # What lay there before is gone.
        first = max(0, self._index(begin))
        last = self._index(end - 1) + 1
        for block in [b for b in self._blocks[first:last] if b.begin < end and begin < b.end]:
            self._remove(block)
        block = _Block(begin, end, stream, StorageWeakRef(storage))
        at = bisect.bisect_left(self._begins, begin)
        self._blocks.insert(at, block)
        self._begins.insert(at, begin)
        return block

    def _remove(self, block: _Block) -> None:
        at = bisect.bisect_left(self._begins, block.begin)
        assert self._blocks[at] is block
        del self._blocks[at], self._begins[at]
        if block.allocated_on is not None and any(a.stream != block.allocated_on for a in block.accesses):
            used_until = [self.record(stream) for stream in sorted(block.used_by)]
            self._freed.setdefault(block.allocated_on, []).append((block, used_until))

    def _collect(self) -> None:
        """Find the storages that are gone."""
        for block in [block for block in self._blocks if block.weak.expired()]:
            self._remove(block)

    def _hand_out(self, block: _Block, used_until: Sequence[int], stream: int) -> None:
        for access in block.accesses:
            is_ordered = access.stream == stream or self._clocks.is_ordered_after(stream, access.number, access.stream)
            if not is_ordered and not any(self._is_before(access, event) for event in used_until):
                again = Access(True, block.begin, block.end, stream, self._number, "allocator", "", Stack.here())
                self._report(Race(access, again, is_reuse=True))


def _has_memory(tensor: Any) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
        and _address_of(tensor) != 0
    )


def _address_of(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # fake ones have none
        return 0


def _extent(tensor: Tensor) -> tuple[int, int]:
    begin = _address_of(tensor)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
