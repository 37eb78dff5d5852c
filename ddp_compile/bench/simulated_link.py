"""A process group of one process that simulates many ranks and a link of limited rate.

Note [What is simulated]
The other ranks hold the same tensors as this one, so a sum is a product with the world size. A transfer occupies the
link for ``alpha + bytes sent / beta``. Transfers of all groups of the process run one at a time, in launch order. An
all-reduce of b bytes sends ``2 (n - 1) / n * b``, as a ring does. A reduce-scatter of b bytes, an all-gather to b bytes
and an all-to-all send half of that. A message to a rank sends its own size; a message from a rank arrives while others
are sent. In an all-to-all, every rank sends what this one sends to itself. Otherwise the other ranks' data leaves the
tensor unchanged; messages that a sharded optimizer adds up bring zeros. Broadcasts, all-gathers of lists and barriers
take no time.

A real collective slows down the computation: NCCL's kernels use multiprocessors and memory bandwidth, and gloo's copies
use cores. A simulated one does not, so hidden communication costs less than in reality.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.profiler import record_function

from ddp_compile.bench.simulated_transfers import CudaLink, HostLink, Transfer
from ddp_compile.runtime.sharded.transfers import REDUCTION_TAG

_BACKEND = "simulated"

# Every collective of a process group in torch 2.11 to 2.15, except for those below. fmt: off
_REFUSED = (
    "_end_coalescing",
    "_start_coalescing",
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "gather",
    "monitored_barrier",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "split_group",
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """How long a transfer takes; raises a ValueError if a number is out of range."""

    world_size: int  #: number of simulated ranks, at least 2
    alpha_s: float  #: latency of one collective, in seconds
    bytes_per_second: float  #: rate of the link

    def __post_init__(self) -> None:
        if not isinstance(self.world_size, int) or self.world_size < 2:
            raise ValueError(f"world_size={self.world_size} must be an integer of at least 2; one rank reduces nothing")
        if not 0 <= self.alpha_s < math.inf:
            raise ValueError(f"alpha_s={self.alpha_s} must be at least 0 and finite; pass 50e-6 for 50 microseconds")
        _check_rate("bytes_per_second", self.bytes_per_second)

    def all_reduce_s(self, num_bytes: int) -> float:
        """Seconds that an all-reduce of this many bytes on each rank occupies the link."""
        return self.alpha_s + 2 * self._to_others(num_bytes) / self.bytes_per_second

    def shards_s(self, num_bytes: int) -> float:
        """Seconds of a reduce-scatter, all-gather or all-to-all of this many bytes, all shards together."""
        return self.alpha_s + self._to_others(num_bytes) / self.bytes_per_second

    def message_s(self, num_bytes: int) -> float:
        """Seconds of this many bytes from one rank to another."""
        return self.alpha_s + num_bytes / self.bytes_per_second

    def _to_others(self, num_bytes: int) -> float:
        return num_bytes * (self.world_size - 1) / self.world_size

    @classmethod
    def from_rate(cls, bits_per_second: float, world_size: int, alpha_s: float = 50e-6) -> LinkModel:
        """A ring of ranks, each with one full-duplex link of this rate."""
        _check_rate("bits_per_second", bits_per_second)
        return cls(world_size=world_size, alpha_s=alpha_s, bytes_per_second=bits_per_second / 8)


def _check_rate(setting: str, rate: float) -> None:
    if not 0 < rate < math.inf:
        raise ValueError(f"{setting}={rate} must be positive and finite; pass for example {setting}=1e9")


def init_simulated_process_group(model: LinkModel, device: torch.device) -> None:
    """``init_process_group`` with a default group that is simulated; this process is rank 0.

    ``destroy_process_group`` ends it, after the transfers that are still under way. The tensors to reduce are on
    ``device``, CPU or CUDA. A CUDA device is timed first, for about 0.3 s. Raises a ValueError for another device, or
    if there is a default group already.
    """
    device = _checked_device(device)
    # The extended API hands pg_options over as they are.
    dist.Backend.register_backend(_BACKEND, _create_process_group, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(
        _BACKEND,
        store=dist.HashStore(),  # type: ignore[attr-defined]  # public, but not in the stub
        rank=0,
        world_size=model.world_size,
        pg_options=lambda: SimulatedProcessGroup(_Line(model, device), owns_line=True),
    )


def set_link_model(model: LinkModel) -> None:
    """Change the default group's link for transfers that are launched from now on.

    Raises a ValueError for another world size, or if the default group is not simulated.
    """
    group = dist.group.WORLD
    if not isinstance(group, SimulatedProcessGroup):
        raise ValueError(f"the default process group {group} is not simulated; call init_simulated_process_group first")
    if model.world_size != group.size():
        raise ValueError(f"world_size={model.world_size} must stay {group.size()}; initialize another process group")
    group.line.model = model


class _Line:
    """The link and its present rate. All groups of the process share one."""

    def __init__(self, model: LinkModel, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.out: CudaLink | HostLink = CudaLink(device) if device.type == "cuda" else HostLink()
        self.into: CudaLink | HostLink | None = None  # made when it is needed

    def coming_in(self) -> CudaLink | HostLink:
        if self.into is None:
            self.into = CudaLink(self.device) if self.device.type == "cuda" else HostLink()
        return self.into

    def close(self) -> None:
        self.out.close()
        if self.into is not None:
            self.into.close()


class SimulatedProcessGroup(dist.ProcessGroup):
    """Rank 0 of simulated ranks. Do not make one yourself: call `init_simulated_process_group`."""

    def __init__(self, line: _Line, owns_line: bool) -> None:
        # torch's stub has only the three-argument constructor, whose groups do not call into Python.
        super().__init__(0, line.model.world_size)  # type: ignore[call-arg]
        self.line = line
        self._owns_line = owns_line
        self._object_size = -1

    # Called by name from C++. The base class would keep the group's name in its backends, of which there are none.

    def getBackendName(self) -> str:
        return _BACKEND

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def _get_backend(self, device: torch.device) -> dist.ProcessGroup:  # type: ignore[override]
        """``batch_isend_irecv`` of torch 2.15 asks the backend whether it coalesces messages."""
        return self

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        factor = _factor_of(dist.ReduceOp.SUM if opts is None else opts.reduceOp.op, self.size())
        seconds = self.line.model.all_reduce_s(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        return self._launch("all_reduce", tensors, factor, seconds)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        if self._is_of_object(input):
            return self.allgather([list(output.view(self.size(), -1))], [input.view(-1)])
        # In place, as for the parameters of a sharded optimizer, the other parts stay; else they are in new memory.
        own = input.detach().reshape(1, -1).expand(self.size(), -1) if output.data_ptr() != input.data_ptr() else None
        seconds = self.line.model.shards_s(output.nbytes)
        return self._launch("all_gather", [output.view(self.size(), -1)], 1, seconds, source=own)

    _allgather_base = all_gather_single  # before torch 2.13

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        own = input.detach().reshape(-1)[: output.numel()].view_as(output)
        factor = _factor_of(dist.ReduceOp.SUM if opts is None else opts.reduceOp.op, self.size())
        return self._launch("reduce_scatter", [output], factor, self.line.model.shards_s(input.nbytes), source=own)

    _reduce_scatter_base: Any = reduce_scatter_single

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> dist.Work:
        own = input.detach().view(self.size(), -1)[:1].expand(self.size(), -1)
        seconds = self.line.model.shards_s(input.nbytes)
        return self._launch("all_to_all", [output.view(self.size(), -1)], 1, seconds, source=own)

    alltoall_base: Any = all_to_all_single

    def _is_of_object(self, message: Tensor) -> bool:
        """Whether ``all_gather_object`` of torch 2.15 sends it: first the size of the object, then its bytes."""
        is_size = message.dtype is torch.int64 and message.numel() == 1
        is_object = message.dtype is torch.uint8 and message.numel() == self._object_size
        self._object_size = int(message) if is_size else -1
        return is_size or is_object

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        return self._launch("send", tensors, 1, self.line.model.message_s(sum(tensor.nbytes for tensor in tensors)))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        seconds = self.line.model.message_s(sum(tensor.nbytes for tensor in tensors))
        # It would otherwise add up what happened to be in new memory.
        brought = tensors[0].new_zeros(()).expand_as(tensors[0]) if tag == REDUCTION_TAG else None
        return self._launch("recv", tensors, 1, seconds, self.line.coming_in(), brought)

    def _launch(
        self,
        name: str,
        tensors: list[Tensor],
        factor: int,
        seconds: float,
        link: CudaLink | HostLink | None = None,
        source: Tensor | None = None,
    ) -> dist.Work:
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise NotImplementedError(f"{name} of a {tensor.layout} tensor is not simulated; pass a dense one")
            if tensor.device != self.line.device:
                raise ValueError(
                    f"device={self.line.device} of the simulated link must be the tensor's, {tensor.device}"
                )
        with record_function(f"simulated::{name}"):  # counted in profiles; real groups have their own ranges
            return _SimulatedWork((link or self.line.out).launch(Transfer(tensors, factor, seconds, source)))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        return _completed(tensors)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for copies, tensor in zip(outputs, inputs, strict=True):
            for copy in copies:
                copy.data.copy_(tensor.detach())
        return _completed([copy for copies in outputs for copy in copies])

    def barrier(self, opts: Any = None) -> dist.Work:
        return _completed([])

    def shutdown(self) -> None:
        if self._owns_line:
            self.line.close()


def _refuse(name: str, *_args: Any, **_kwargs: Any) -> Any:
    raise NotImplementedError(
        f"{name} is not simulated; all_reduce, all_gather, reduce_scatter_tensor, all_to_all_single, send, recv,"
        " broadcast and barrier are"
    )


for _name in _REFUSED:
    # The base class would look for a backend, and report that the device has none.
    setattr(SimulatedProcessGroup, _name, partial(_refuse, _name))


def _create_process_group(common: Any, make: Callable[[], dist.ProcessGroup] | None) -> dist.ProcessGroup:
    if make is not None:
        return make()
    default = dist.group.WORLD
    assert isinstance(default, SimulatedProcessGroup)
    if common.group_size != default.size():
        raise NotImplementedError(
            f"new_group of {common.group_size} ranks is not simulated, only of all {default.size()}; pass no ranks"
        )
    return SimulatedProcessGroup(default.line, owns_line=False)


def _checked_device(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device={device} must be a CPU or a CUDA device; others have no simulated link")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={device} must be one of the {torch.cuda.device_count()} CUDA devices that torch sees")
    # A tensor's device has an index, and so must the devices of a future.
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _factor_of(op: Any, world_size: int) -> int:
    """The factor of a reduction over ranks that all hold the same values."""
    kinds = dist.ReduceOp
    if op == kinds.SUM:
        return world_size
    if op in (kinds.AVG, kinds.MIN, kinds.MAX, kinds.BAND, kinds.BOR):
        return 1
    raise NotImplementedError(f"all_reduce with {op} is not simulated; SUM, AVG, MIN, MAX, BAND and BOR are")


class _SimulatedWork(dist.Work):
    """A collective under way. Its future is done when the collective is over, on the host or on a stream."""

    def __init__(self, future: Future[list[Tensor]]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        # On a CUDA device the caller's current stream waits here, not the host.
        self._future.wait()
        return True

    def get_future(self) -> Future[list[Tensor]]:
        return self._future


def _completed(tensors: list[Tensor]) -> dist.Work:
    """A work that is complete, after earlier work on the caller's current streams."""
    future: Future[list[Tensor]] = Future(devices=[*{tensor.device for tensor in tensors if tensor.is_cuda}])
    future.set_result(tensors)
    return _SimulatedWork(future)
