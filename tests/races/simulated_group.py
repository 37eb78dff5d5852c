"""A process group between real ranks that treats the CPU's tensors as NCCL treats those of a GPU.

A collective waits for the stream that is current when it is launched, and runs on a stream of its group; messages from
rank to rank run on one for each pair. Received values are NaN until the first wait. By then gloo, which transfers
everything, has brought them. ``Work.wait()`` holds up the current stream and not the host.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from detector import RaceDetector
from simulated_streams import SimulatedStreams
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

BACKEND = "streamed"
_torch_distributed: Any = dist
_Gloo = _torch_distributed.ProcessGroupGloo


class Launch(NamedTuple):
    """A collective as it was started on one rank."""

    group: str
    name: str


class Device:
    """State that the groups of one process share.

    ``delay`` is called before each launch and wait, so that ranks and threads come in another order; with
    ``blocks_host``, ``Work.wait()`` returns when a transfer is over.
    """

    def __init__(self, streams: SimulatedStreams, delay: Callable[[], None], blocks_host: bool) -> None:
        self.streams = streams
        self.delay = delay
        self.blocks_host = blocks_host
        self.launches: list[Launch] = []
        self.lock = threading.Lock()


_device: Device | None = None


def use(device: Device) -> None:
    """From now on ``new_group(backend=BACKEND)`` makes groups on this device."""
    global _device
    _device = device
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(common: Any, _options: Any) -> dist.ProcessGroup:
    assert _device is not None
    return StreamedProcessGroup(common.store, common.group_rank, common.group_size, common.timeout, _device)


class StreamedProcessGroup(dist.ProcessGroup):
    """See the module. Made by ``new_group``."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, device: Device) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        self._device = device
        self._gloo = _Gloo(_torch_distributed.PrefixStore("gloo", store), rank, size, timeout)
        self._stream = device.streams.new()
        self._streams_of_peers: dict[int, int] = {}

    #: Asked by ``batch_isend_irecv`` of the group's backend, from torch 2.15 on.
    supports_coalescing = False

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def name(self) -> str:
        return self.getBackendName()

    # Called by name from C++.

    def getBackendName(self) -> str:
        return "mpi" if self._device.blocks_host else BACKEND  # see `ddp_compile.runtime.comm.streams.work_blocks_host`

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def get_group_store(self) -> Any:
        return self._store

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        opts = opts or dist.AllreduceOptions()
        return self._launch("all_reduce", tensors, tensors, lambda copies: (self._gloo.allreduce(copies, opts), copies))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        is_source = opts.rootRank == self.rank()
        inputs, outputs = (tensors, []) if is_source else ([], tensors)

        def start(copies: list[Tensor]) -> tuple[Any, list[Tensor]]:
            sent = copies if is_source else [torch.empty_like(tensor) for tensor in tensors]
            return self._gloo.broadcast(sent, opts), [] if is_source else sent

        return self._launch("broadcast", inputs, outputs, start)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        outputs = tensors if opts.rootRank == self.rank() else []
        return self._launch("reduce", tensors, outputs, lambda copies: (self._gloo.reduce(copies, opts), copies))

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def start(copies: list[Tensor]) -> tuple[Any, list[Tensor]]:
            into = [torch.empty_like(output) for output in outputs[0]]
            return self._gloo.allgather([into], copies), into

        return self._launch("all_gather", inputs, outputs[0], start)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        parts = list(output.view(-1).chunk(self.size()))

        def start(copies: list[Tensor]) -> tuple[Any, list[Tensor]]:
            into = [torch.empty_like(part) for part in parts]
            return self._gloo.allgather([into], [copies[0].view(-1)]), into

        # In place, a rank's own part is only read.
        others = [part for part in parts if part.data_ptr() != input.data_ptr()]
        own = [rank for rank, part in enumerate(parts) if part.data_ptr() == input.data_ptr()]
        return self._launch("all_gather", [input], others, start, left_out=own)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        def start(copies: list[Tensor]) -> tuple[Any, list[Tensor]]:
            return self._gloo.allreduce(copies), [copies[0].view(-1).chunk(self.size())[self.rank()]]

        return self._launch("reduce_scatter", [input], [output], start)

    _reduce_scatter_base: Any = reduce_scatter_single

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> dist.Work:
        def start(copies: list[Tensor]) -> tuple[Any, list[Tensor]]:
            into = torch.empty_like(output)
            return self._gloo.alltoall_base(into, copies[0], output_sizes, input_sizes), [into]

        return self._launch("all_to_all", [input], [output], start)

    alltoall_base: Any = all_to_all_single

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        return self._launch("send", tensors, [], lambda copies: (self._gloo.send(copies, to, tag), []), peer=to)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        def start(_copies: list[Tensor]) -> tuple[Any, list[Tensor]]:
            into = [torch.empty_like(tensor) for tensor in tensors]
            return self._gloo.recv(into, source, tag), into

        return self._launch("recv", [], tensors, start, peer=source)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._launch("barrier", [], [], lambda _copies: (self._gloo.barrier(), []))

    def _launch(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        start: Callable[[list[Tensor]], tuple[Any, list[Tensor]]],
        peer: int | None = None,
        left_out: Sequence[int] = (),
    ) -> dist.Work:
        device, streams = self._device, self._device.streams
        device.delay()
        stream = self._stream if peer is None else self._stream_of(peer)
        inputs, outputs = [t.detach() for t in inputs], [t.detach() for t in outputs]
        for tensor in (*inputs, *outputs):
            if tensor.layout is not torch.strided:
                raise NotImplementedError(f"{name} of a {tensor.layout} tensor; NCCL takes dense ones")
            streams.detector.note_device_memory(tensor)
        with _disable_current_modes(), device.lock:
            device.launches.append(Launch(self._name, name))
            streams.detector.wait_for_stream(stream, streams.current())
            streams.detector.operator(f"c10d::{name}", stream, inputs, outputs)
            work, results = start([tensor.clone() for tensor in inputs])
            results = [result for place, result in enumerate(results) if place not in left_out]
            with _unsafe_preserve_version_counter(tuple(outputs)):
                for tensor in outputs:
                    if tensor.is_floating_point():
                        tensor.fill_(torch.nan)
            return _Work(device, name, work, stream, inputs, outputs, [r for r in results if outputs])

    def _stream_of(self, peer: int) -> int:
        if peer not in self._streams_of_peers:
            self._streams_of_peers[peer] = self._device.streams.new()
        return self._streams_of_peers[peer]


def host_groups(detector: RaceDetector) -> type:
    """A ``ProcessGroupGloo`` as `ddp_compile.runtime.comm.process_groups.host_group` makes it, for hosts' memory."""

    class HostGroup(_Gloo):  # type: ignore[misc]
        def alltoall_base(self, output: Tensor, input: Tensor, *sizes: Any) -> Any:
            for tensor in (output, input):
                detector.note_host_memory(tensor)
            return super().alltoall_base(output, input, *sizes)

        def allreduce(self, tensors: list[Tensor], *options: Any) -> Any:
            for tensor in tensors:
                detector.note_host_memory(tensor)
            return super().allreduce(tensors, *options)

    return HostGroup


class _Work(dist.Work):
    def __init__(
        self,
        device: Device,
        name: str,
        work: Any,
        stream: int,
        inputs: list[Tensor],
        outputs: list[Tensor],
        results: list[Tensor],
    ) -> None:
        super().__init__()
        self._device = device
        self._name = name
        self._work = work
        self._stream = stream
        self._tensors = [*inputs, *outputs]  # alive until it is waited for
        self._outputs = outputs
        self._results = results
        self._lock = threading.Lock()
        self._done = device.streams.detector.record(stream)

    def wait(self, timeout: Any = None) -> bool:
        streams = self._device.streams
        self._device.delay()
        self.bring()
        if not streams.is_ignored("wait for work"):
            streams.detector.wait(streams.current(), self._done)
            if self._device.blocks_host:
                streams.detector.host_waits(self._stream)
        self._tensors = []
        return True

    def bring(self) -> None:
        """Put what the ranks have sent into the outputs."""
        with self._lock, _disable_current_modes():
            work, self._work = self._work, None
            if work is not None:
                work.wait()
                with _unsafe_preserve_version_counter(tuple(self._outputs)):
                    for output, result in zip(self._outputs, self._results, strict=True):
                        output.copy_(result.view_as(output))

    def is_completed(self) -> bool:
        return self._work is None

    def get_future(self) -> Any:
        # A work that is not waited for keeps its tensors until it is done.
        for tensor in self._tensors:
            self._device.streams.detector.used_by(tensor, self._stream)
        return _StreamFuture(self._device, self, self._done, lambda: self._outputs)


class _StreamFuture(Future[Any]):
    """A future whose value is there when a stream has reached an event; callbacks run now, on another stream."""

    def __init__(self, device: Device, work: _Work | None, done: int, value: Callable[[], Any]) -> None:
        super().__init__()
        self._device = device
        self._work = work
        self._done = done
        self._value = value
        self.set_result(None)

    def wait(self) -> Any:
        if self._work is not None:
            self._work.bring()
        if not self._device.streams.is_ignored("wait for work"):
            self._hold_up_current()
        return self._value()

    def _hold_up_current(self) -> None:
        streams = self._device.streams
        streams.detector.wait(streams.current(), self._done)
        value = self._value()
        for tensor in value if isinstance(value, list) else [value]:
            streams.detector.used_by(tensor, streams.current())

    def value(self) -> Any:
        return self._value()

    def done(self) -> bool:
        return True

    def then(self, callback: Callable[[Any], Any]) -> Any:
        streams = self._device.streams
        if self._work is not None:
            self._work.bring()
        with streams.on(streams.new()):
            self._hold_up_current()
            result = callback(self)
            return _StreamFuture(self._device, None, streams.detector.record(streams.current()), lambda: result)
