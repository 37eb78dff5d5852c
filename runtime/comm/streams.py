"""Streams and events of accelerators. No other file of the runtime deals with them directly.

docs/streams.md says which streams meet in an iteration, and which waits for which. A stream that reads another one's
writes waits for an `Event` of it. `used_here` announces memory that is used outside of the stream that allocated it.
On a device without streams, such as the CPU, all of this does nothing, so callers need no branches. Everything goes
through `backend`, which tests replace by a simulated one that finds accesses that no wait orders.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError, this_rank

# The ``Work.wait()`` of these returns when a transfer is over, whatever the device of its tensors.
_BLOCKING_BACKENDS = frozenset({"gloo", "mpi"})

#: `torch.Stream`, of which ``torch.cuda.Stream`` is a subclass; tests put others in its place.
Stream = Any


class Backend:
    """Calls `torch.accelerator`, which has the streams of CUDA, ROCm, XPU and of the devices that vendors register.

    Devices are those of tensors.
    """

    def __init__(self) -> None:
        self._has_streams: dict[str, bool] = {"cpu": False, "meta": False}

    def has_streams(self, device: torch.device) -> bool:
        if device.type not in self._has_streams:
            try:
                # A device with a single stream may return that one for a new one, as MPS does.
                self._has_streams[device.type] = torch.Stream(device) != torch.Stream(device)
            except RuntimeError:  # torch has no such device, or it has no streams
                self._has_streams[device.type] = False
        return self._has_streams[device.type]

    def is_capturing(self, device: torch.device) -> bool:
        ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
        return ask is not None and bool(ask())

    def current(self, device: torch.device) -> Stream:
        return torch.accelerator.current_stream(device)

    def new(self, device: torch.device) -> Stream:
        return torch.Stream(device)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        # Not `with stream`: a torch.Stream holds what it replaced, for one thread only, and once before torch 2.12.
        device, previous = torch.accelerator.current_device_index(), self.current(stream.device)
        torch.accelerator.set_stream(stream)  # and makes its device the current one
        try:
            yield
        finally:
            torch.accelerator.set_stream(previous)
            torch.accelerator.set_device_index(device)

    def in_thread(self, device: torch.device) -> AbstractContextManager[Any]:
        torch.accelerator.set_device_index(device)
        return self.on(self.new(device))

    def record(self, device: torch.device) -> Any:
        return self.current(device).record_event()

    def wait(self, device: torch.device, event: Any) -> None:
        self.current(device).wait_event(event)

    def used_by(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)

    def record_timed(self, device: torch.device) -> Any:
        event = torch.Event(device, enable_timing=True)
        event.record(self.current(device))
        return event

    def has_passed(self, event: Any, wait: bool) -> bool:
        if wait:
            event.synchronize()
        return bool(event.query())

    def elapsed_ns(self, since: Any, until: Any) -> int:
        return round(since.elapsed_time(until) * 1e6)

    def reads_racing(self, device: torch.device, since: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def launched(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Does nothing: kernels run in the order of their streams."""


#: Everything here calls it; only tests replace it.
backend = Backend()


class Event:
    """A point on a stream: all work queued on it when the event was recorded; see `record`."""

    __slots__ = ("_device", "_recorded", "stream")

    def __init__(self, device: torch.device, stream: Stream | None, recorded: Any) -> None:
        self.stream = stream
        self._device = device
        self._recorded = recorded

    def wait(self) -> None:
        """Make the current stream wait for it. The host does not wait."""
        if self.stream is not None:
            backend.wait(self._device, self._recorded)

    def reads_racing(self) -> AbstractContextManager[Any]:
        """Inside, operators may race with writes after this event, but with no others."""
        return nullcontext() if self.stream is None else backend.reads_racing(self._device, self._recorded)


def has_streams(device: torch.device) -> bool:
    """Whether a device has streams, so that the host runs ahead of operators."""
    return backend.has_streams(device)


def is_capturing(device: torch.device) -> bool:
    """Whether work for a device is being recorded into a graph, to be replayed later."""
    return backend.has_streams(device) and backend.is_capturing(device)


def refuse_capture(device: torch.device, what: str) -> None:
    """Raise a ReplicationError if a call would be captured, and replayed without what Python does each time."""
    if is_capturing(device):
        raise ReplicationError(
            f"{this_rank()}: {what} was called while work for {device} is being captured into a graph"
            " (torch.cuda.graph). A replay repeats kernels and collectives, but not the messages by which the ranks"
            " notice that they are out of step. Call it outside the capture; mode='reduce-overhead' captures the work"
            " between the collectives"
        )


def current(device: torch.device) -> Stream | None:
    """The current stream of a device; None if it has none."""
    return backend.current(device) if backend.has_streams(device) else None


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, it is the current device, where NCCL sends objects and barriers: the user may not have set it."""
    return torch.accelerator.device_index(device.index)


def record(device: torch.device) -> Event:
    """An event after all work queued so far on the current stream of a device."""
    if not backend.has_streams(device):
        return Event(device, None, None)
    return Event(device, backend.current(device), backend.record(device))


def record_on(stream: Stream, device: torch.device) -> Event:
    """Like `record`, on another stream than the current one."""
    with backend.on(stream):
        return record(device)


def used_here(tensors: Sequence[Tensor]) -> None:
    """Keep memory from being reused before the current stream is done with it, if another stream allocated it.

    Args:
        tensors: On one device, in memory of torch's allocator; so no views made by DLPack.
    """
    if tensors and backend.has_streams(tensors[0].device):
        stream = backend.current(tensors[0].device)
        for tensor in tensors:
            backend.used_by(tensor, stream)


class SideStream:
    """A stream in addition to the caller's, made at its first use. On a device without streams it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Stream | None = None

    def on(self) -> AbstractContextManager[Any]:
        """Inside, it is the current stream."""
        if not backend.has_streams(self._device):
            return nullcontext()
        if self._stream is None:
            self._stream = backend.new(self._device)
        return backend.on(self._stream)

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Inside, it is the current stream, after waiting for the previous one."""
        so_far = record(self._device)
        with self.on():
            so_far.wait()
            yield


class StreamClock:
    """Times of points on the current stream of a device, on the host's monotonic clock in ns.

    On a device without streams a mark is such a time. Otherwise it is an event, which `read` turns into one when the
    device has passed it. Making a clock for such a device waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_of_host = not backend.has_streams(device)  #: whether marks are times
        if not self.is_of_host:
            self._origin = backend.record_timed(device)
            backend.has_passed(self._origin, wait=True)
        self._origin_ns = self._began_ns = time.monotonic_ns()

    def mark(self) -> Any:
        """Now, or the end of all work queued so far on the current stream."""
        return time.monotonic_ns() if self.is_of_host else backend.record_timed(self._device)

    def has_passed(self, mark: Any, wait: bool) -> bool:
        """Whether the device has come to a mark; if ``wait``, the host waits until it has."""
        return self.is_of_host or backend.has_passed(mark, wait)

    def read(self, mark: Any) -> Any:
        """The time of a mark that the device has passed; None of None."""
        if mark is None or self.is_of_host:
            return mark
        return self._origin_ns + backend.elapsed_ns(self._origin, mark)

    def move_to(self, mark: Any) -> Any:
        """`read`, and count from this mark from now on: torch gives the time between events as a float32 in ms."""
        at_ns = self.read(mark)
        if not self.is_of_host:
            self._origin, self._origin_ns = mark, at_ns
        return at_ns

    def drift(self) -> tuple[int, float]:
        """When this clock was made, and by how much it has run ahead of the host's since, as a share of its own time.

        Devices have clocks of their own. Waits for the device.
        """
        if self.is_of_host:
            return self._began_ns, 0.0
        now = self.mark()
        self.has_passed(now, wait=True)
        now_ns, own_ns = time.monotonic_ns(), self.read(now)
        return self._began_ns, (own_ns - now_ns) / (own_ns - self._began_ns)


def run_on_own_stream(device: torch.device, function: Callable[[], None]) -> None:
    """Call a function on a new stream, in a thread that torch has not used yet."""
    with backend.in_thread(device) if backend.has_streams(device) else nullcontext():
        function()


def launched(name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    """Report a kernel that was started on the current stream, bypassing torch's dispatcher."""
    backend.launched(name, reads, writes)


def work_blocks_host(process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``Work.wait()`` blocks the host until the transfer is over, instead of holding up the current stream."""
    if not backend.has_streams(device):
        return True
    backend_name = torch_internals.backend_name(process_group, device)
    return backend_name in _BLOCKING_BACKENDS or (backend_name == "nccl" and _nccl_blocks_host())


def _nccl_blocks_host() -> bool:
    value = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", os.environ.get("NCCL_BLOCKING_WAIT", "0"))
    return value.lower() in ("1", "y", "yes", "t", "true")  # as in torch/csrc/distributed/c10d/Utils.hpp, torch 2.13
