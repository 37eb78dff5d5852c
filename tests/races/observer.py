"""Reports every operator of torch's dispatcher to a `RaceDetector`, and records those that make the host wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from detector import Stack
from simulated_streams import SimulatedStreams
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_compile import graph_ops

aten = torch.ops.aten

#: They change where a tensor is, and not its values; or they read nothing.
_WITHOUT_VALUES = {
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.set_.source_Storage,
    aten.resize_.default,
    aten.detach_.default,
    aten.is_same_size.default,
    aten.is_pinned.default,
    aten.sym_size.int,
}
#: Allocated, and not written.
_UNWRITTEN = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
#: The host needs the values, or how many there are.
_HOST_WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::repeat_interleave.Tensor",
}

#: The operators by which compiled code calls the reducer.
_OF_GRAPHS = (graph_ops.BUCKET_READY, graph_ops.MOVE_BUCKET, graph_ops.HOLD_BACK, graph_ops.AWAIT_PARAMETERS)

#: Where kernels of the CPU are started.
_KERNELS = "kernels/native/"


class Observer(TorchDispatchMode):
    """To be entered in each thread."""

    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__()
        self._streams = streams

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile inside."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_GRAPHS and not _any_fake(args):
            with self:  # what they do in Python is to be seen
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        result = func(*args, **kwargs)
        if not _any_fake((args, kwargs, result)):
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        streams, name = self._streams, func._schema.name
        if name == "aten::_local_scalar_dense" and any(_KERNELS in call for call in Stack.here().ours()[:1]):
            return  # read by a kernel, which is reported on its own
        stream = streams.current()
        results = list(_tensors_in(result))
        streams.detector.allocated(results, stream)
        if func in _WITHOUT_VALUES:
            return
        reads, writes = [], []
        given = [*args, *(kwargs.get(argument.name) for argument in func._schema.arguments[len(args) :])]
        for argument, value in zip(func._schema.arguments, given, strict=False):
            if argument.alias_info is None:
                reads += _tensors_in(value)
            elif argument.alias_info.is_write:
                writes += _tensors_in(value)
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if name not in _UNWRITTEN and not is_view:
            fresh = [r for r, of in zip(_listed(result), func._schema.returns, strict=False) if of.alias_info is None]
            writes += _tensors_in(fresh)
        if is_view and not writes:
            return
        streams.detector.operator(name, stream, reads, writes)
        if name in _HOST_WAITS and not all(map(streams.detector.is_host_memory, reads)):
            note_host_wait(streams, name)


def note_host_wait(streams: SimulatedStreams, name: str) -> None:
    """The host waits for the current stream."""
    streams.host_waits.append((name, Stack.here()))
    streams.detector.host_waits(streams.current())


@contextmanager
def observing(streams: SimulatedStreams) -> Iterator[None]:
    """Inside, the detector of the streams sees all that this thread and the averaging threads do."""
    to_host, frombuffer, wait_all = (Tensor.tolist, Tensor.cpu), torch.frombuffer, torch.futures.wait_all

    def observed(method: Any) -> Any:
        def call(tensor: Tensor) -> Any:
            if not isinstance(tensor, FakeTensor) and not streams.detector.is_host_memory(tensor):
                streams.detector.operator(method.__name__, streams.current(), [tensor], [])
                note_host_wait(streams, method.__name__)
            return method(tensor)

        return call

    def observed_frombuffer(*args: Any, **kwargs: Any) -> Tensor:
        tensor = frombuffer(*args, **kwargs)
        streams.detector.note_host_memory(tensor)
        return tensor

    streams.on_thread = lambda: Observer(streams)
    # These read and make tensors without an operator.
    Tensor.tolist, Tensor.cpu = map(observed, to_host)  # type: ignore[method-assign]
    torch.frombuffer = observed_frombuffer
    # Through C++, futures would come back as those of torch, which know no streams.
    torch.futures.wait_all = lambda futures: [future.wait() for future in futures]
    try:
        with Observer(streams):
            yield
    finally:
        (Tensor.tolist, Tensor.cpu), torch.frombuffer = to_host, frombuffer  # type: ignore[method-assign]
        torch.futures.wait_all = wait_all


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def _any_fake(value: Any) -> bool:
    return any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in _tensors_in(value))
