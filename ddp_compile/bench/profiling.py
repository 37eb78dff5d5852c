"""One step under torch.profiler, with hooks on the parameters, and its peak memory."""

from __future__ import annotations

import gc
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_compile.bench.settings import Profiled
from ddp_compile.bench.training import Training

# Note [Each communication once]
# A trace has several events of one all-reduce: its launch (an operator, or the simulated group's range), the process
# group's own range, on a GPU a copy of every range whose kernels run there, and the kernel. Launches are counted, and
# the group's range gives the bytes. The timeline shows when the communication runs: a kernel if there is one, and
# gloo's range, but not NCCL's, which ends as soon as the kernel has been queued. The copies are ignored.
# gloo's messages, which carry a sharded optimizer's shards, are in no trace: see `unprofiled_messages`. The timeline
# shows them from their start until the reducer waits for them.
_COPY_ON_GPU = "gpu_user_annotation"
_STEP = "ddp_compile_bench::step"
_CENSUS = "ddp_compile_bench::census"
_REDUCER = "ddp_compile::bucket_"
_LAUNCHES = {"c10d::allreduce_", "simulated::all_reduce"}
#: Parts of names: NCCL's kernels, and the one that a simulated link waits with.
_COMMUNICATION_KERNELS = ("AllReduce", "ReduceScatter", "AllGather", "spin_kernel")
_OF_SHARDS = re.compile(rf"{_REDUCER}(\d+)_(launch|wait|gather|gather_wait)")
_ITEM_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2}


def profile_step(training: Training, parameters: Sequence[Parameter]) -> Profiled:
    """Run two more steps: one with hooks on the parameters, one under the profiler."""
    ready = _ready_times(training, parameters)
    activities = [ProfilerActivity.CPU]
    if training.clock.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with _traced_events(activities=activities, record_shapes=True) as events, record_function(_STEP):
        marks = training.step()
        training.clock.settle()
    begin_us = next(event["ts"] for event in events if event["name"] == _STEP and event["ph"] == "X")

    def ms(mark: Any) -> float:
        return 1000 * training.clock.elapsed_s(marks.start, mark)

    lanes: list[dict[str, float | str]] = []
    before = 0.0
    for forward, backward in zip(marks.forwards, marks.backwards, strict=True):
        lanes += [_event("compute", "forward", before, ms(forward))]
        lanes += [_event("compute", "backward", ms(forward), ms(backward))]
        before = ms(backward)
    lanes += [_event("compute", "optimizer", before, ms(marks.end))]
    for event in events:
        lane = _lane_of(event)
        if lane is not None:
            start = (event["ts"] - begin_us) / 1000
            lanes.append(_event(lane, event["name"], start, start + event["dur"] / 1000))
    if not any(lane["lane"] == "communication" for lane in lanes):
        lanes += _shards_under_way(lanes, ms(marks.end))
    return Profiled(
        step_ms=ms(marks.end),
        num_all_reduces=sum(event["name"] in _LAUNCHES for event in events),
        payload_bytes=_payload_bytes(events),
        events=lanes,
        ready=ready,
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
    with _traced_events(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
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


def allocated_bytes(run: Callable[[], object]) -> int:
    """Bytes that the CPU's allocator has given out during ``run`` and has not got back at its end."""
    with _traced_events(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        run()
    return sum(event["args"]["Bytes"] for event in events if event["name"] == "[memory]")


@contextmanager
def _traced_events(**arguments: Any) -> Iterator[list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    with profile(**arguments) as profiler:
        yield events
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        traced = json.loads(path.read_text())["traceEvents"]
    events += [event for event in traced if event.get("cat") != _COPY_ON_GPU]  # see Note [Each communication once]


def _ready_times(training: Training, parameters: Sequence[Parameter]) -> list[tuple[float, int]]:
    """Milliseconds from the end of the (last) forward to each gradient's arrival, with the gradient's bytes."""
    marks: list[tuple[Any, int]] = []

    def note(parameter: Parameter) -> None:
        marks.append((training.clock.now(), parameter.numel() * parameter.element_size()))

    hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in parameters]
    training.step()  # some implementations compile again because of the hooks
    marks.clear()
    step = training.step()
    training.clock.settle()
    for hook in hooks:
        hook.remove()
    begin = step.forwards[-1]
    arrived = [(1000 * training.clock.elapsed_s(begin, mark), num_bytes) for mark, num_bytes in marks]
    return [(ms, num_bytes) for ms, num_bytes in arrived if ms >= 0 and not math.isnan(ms)]


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


def _lane_of(event: dict[str, Any]) -> str | None:
    if event.get("ph") != "X":
        return None
    name = event["name"]
    if name.startswith(_REDUCER):
        return "reducer"
    # See Note [Each communication once].
    if event.get("cat") == "kernel":
        communicates = any(part in name for part in _COMMUNICATION_KERNELS)
    else:
        communicates = name == "gloo:all_reduce"
    return "communication" if communicates else None


def _shards_under_way(lanes: Sequence[dict[str, Any]], end_ms: float) -> list[dict[str, float | str]]:
    """Reduce-scatters and all-gathers, from the start until they have been waited for.

    Gathers are started by one step's optimizer and waited for in the forward of the next step.
    """
    started: dict[tuple[str, str], float] = {}
    spans = []
    in_order = [lane for lane in lanes if lane["lane"] == "reducer"]
    if not any("gather" in lane["name"] for lane in in_order):
        return []
    for lane in sorted(in_order, key=lambda lane: lane["start_ms"]):
        if (match := _OF_SHARDS.fullmatch(lane["name"])) is None:
            continue
        bucket, what = match.groups()
        kind = "all-gather" if "gather" in what else "reduce-scatter"
        if what in ("launch", "gather"):
            started[bucket, kind] = lane["start_ms"]
        else:
            spans.append(_event("communication", kind, started.pop((bucket, kind), 0.0), lane["end_ms"]))
    return spans + [_event("communication", kind, start, end_ms) for (_, kind), start in started.items()]


def _event(lane: str, name: str, start_ms: float, end_ms: float) -> dict[str, float | str]:
    return {"lane": lane, "name": name, "start_ms": start_ms, "end_ms": end_ms}
