"""One step under torch.profiler, and its peak memory."""

import gc
import gzip
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_compile.bench.settings import Profiled
from ddp_compile.bench.training import Training

# Note [Each all-reduce once]
# A trace has several events of one all-reduce: its launch (an operator, or the simulated group's range), the process
# group's own range, and on a GPU a copy of every range whose kernels run there. Launches are counted, the group's range
# gives the bytes, and the copies are ignored.
_COPY_ON_GPU = "gpu_user_annotation"
_CENSUS = "ddp_compile_bench::census"
_LAUNCHES = {"c10d::allreduce_", "simulated::all_reduce"}
_ITEM_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2}


def profile_step(training: Training, trace: Path) -> Profiled:
    """Run one more step under the profiler; ``trace`` is a ``.json.gz`` file, which Perfetto shows."""
    activities = [ProfilerActivity.CPU]
    if training.clock.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with _traced_events(trace, activities=activities, record_shapes=True) as events:
        training.step()
        training.clock.settle()
    return Profiled(
        num_all_reduces=sum(event["name"] in _LAUNCHES for event in events), payload_bytes=_payload_bytes(events)
    )


def peak_live_bytes(training: Training, parameters: Sequence[Parameter]) -> int:
    """The most bytes that were live at the same time in a step.

    On a CPU, a census of all tensors tells how much memory is live at one moment of the step, between backward and
    optimizer. The profiler's allocator events tell how much more or less there is at other times. (Counting events from
    the start of the process would be wrong: the profiler does not see that gloo's threads free buffers.) On CUDA the
    allocator keeps this figure.
    """
    if training.clock.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        training.step()
        training.clock.settle()
        return torch.cuda.max_memory_allocated()
    census = 0

    def count(*_: object) -> None:
        nonlocal census
        with record_function(_CENSUS):
            census = live_bytes(parameters)

    hook = training.optimizers[0].register_step_pre_hook(count)
    with (
        tempfile.TemporaryDirectory() as folder,
        _traced_events(Path(folder, "trace.json.gz"), activities=[ProfilerActivity.CPU], profile_memory=True) as events,
    ):
        training.step()
    hook.remove()
    counted_us = next(event["ts"] for event in events if event["name"] == _CENSUS and event["ph"] == "X")
    live = most = at_census = 0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        most = max(most, live)
        if event["ts"] <= counted_us:
            at_census = live
    return census + most - at_census


def live_bytes(parameters: Sequence[Parameter]) -> int:
    """Bytes of the storages of all tensors that Python knows, and of the parameters' gradients.

    Storages may overlap: a gradient's storage is in its bucket's flat buffer. Subclasses do not count, since a sharded
    optimizer's placeholders for gradients have no memory.
    """
    gradients = [parameter.grad for parameter in parameters]
    # Not one tuple of both: it would be among the objects that it contains, and keep all of them alive.
    found = [thing for thing in chain(gradients, gc.get_objects()) if type(thing) in (torch.Tensor, Parameter)]
    storages = set()
    for tensor in found:
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            storages.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    num_bytes = counted_up_to = 0
    for begin, end in sorted(storages):
        num_bytes += max(0, end - max(begin, counted_up_to))
        counted_up_to = max(counted_up_to, end)
    return num_bytes


@contextmanager
def _traced_events(trace: Path, **arguments: Any) -> Iterator[list[dict[str, Any]]]:
    """A list that has the trace's events at the end of the block."""
    events: list[dict[str, Any]] = []
    with profile(**arguments) as profiler:
        yield events
    profiler.export_chrome_trace(str(trace))
    with gzip.open(trace) as file:
        traced = json.load(file)["traceEvents"]
    events += [event for event in traced if event.get("cat") != _COPY_ON_GPU]  # see Note [Each all-reduce once]


def _payload_bytes(events: Sequence[dict[str, Any]]) -> int | None:
    """Bytes of the tensors that process groups' own ranges name, as gloo's and NCCL's do.

    None if there are no such ranges, or if one names a dtype that is unknown here.
    """
    total = 0
    for event in events:
        if event.get("ph") == "X" and event["name"].endswith(":all_reduce") and "Input Dims" in event.get("args", {}):
            shapes, kinds = event["args"]["Input Dims"], event["args"]["Input type"]
            if not _ITEM_BYTES.keys() >= set(kinds):
                return None
            total += sum(math.prod(shape) * _ITEM_BYTES[kind] for shape, kind in zip(shapes, kinds, strict=True))
    return total or None
