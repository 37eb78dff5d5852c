"""Reading a step's trace, tested with traces made by hand, since there may be no GPU to record one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_entries
import pytest

from ddp_compile.bench import profiling
from ddp_compile.bench.implementations import Implementation
from ddp_compile.bench.profiling import profile_step
from ddp_compile.bench.settings import Profiled, WorkloadSettings
from ddp_compile.bench.training import Training
from ddp_compile.bench.workloads import Workload

BEGIN_US = 5000.0
PAYLOAD = {"Input Dims": [[1024]], "Input type": ["float"]}


def event(category: str, name: str, start_ms: float, length_ms: float, **arguments: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": BEGIN_US + 1000 * start_ms,
        "dur": 1000 * length_ms,
        "args": arguments,
    }


def annotated(name: str, start_ms: float, on_gpu_ms: float, **arguments: Any) -> list[dict[str, Any]]:
    """A range, and its copy over the kernels that were queued in it."""
    return [
        event("gpu_user_annotation", name, on_gpu_ms, 20.0),
        event("user_annotation", name, start_ms, 0.1, **arguments),
    ]


def nccl_all_reduce(start_ms: float, on_gpu_ms: float) -> list[dict[str, Any]]:
    return [
        event("cpu_op", "c10d::allreduce_", start_ms, 0.3),
        event("cpu_op", "record_param_comms", start_ms, 0.2),
        *annotated("nccl:all_reduce", start_ms, on_gpu_ms, **PAYLOAD),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", on_gpu_ms, 20.0),
    ]


def simulated_all_reduce(start_ms: float, on_gpu_ms: float) -> list[dict[str, Any]]:
    return [
        *annotated("simulated::all_reduce", start_ms, on_gpu_ms),
        event("kernel", "at::cuda::(anonymous namespace)::spin_kernel(long)", on_gpu_ms, 20.0),
    ]


def gloo_all_reduce(start_ms: float, _on_gpu_ms: float) -> list[dict[str, Any]]:
    return [
        event("cpu_op", "c10d::allreduce_", start_ms, 0.3),
        event("user_annotation", "gloo:all_reduce", 30 * start_ms, 20.0, **PAYLOAD),
    ]


def profiled(monkeypatch: pytest.MonkeyPatch, events: list[dict[str, Any]]) -> Profiled:
    """The harness's reading of a step with this trace."""

    class Recorded:
        def __enter__(self) -> Recorded:
            return self

        def __exit__(self, *_: object) -> None: ...

        def export_chrome_trace(self, path: str) -> None:
            step = annotated("ddp_compile_bench::step", 0.0, 3.0)
            Path(path).write_text(json.dumps({"traceEvents": [*step, *events]}))

    monkeypatch.setattr(profiling, "profile", lambda **_: Recorded())
    workload = Workload(*bench_entries.tiny())
    implementation = Implementation(forward=workload.model)
    training = Training(implementation, workload.model, workload, WorkloadSettings(model="tiny"), 0, 1)
    return profile_step(training, list(workload.model.parameters()))


@pytest.mark.parametrize(
    ("all_reduce", "payload_bytes"),
    [(nccl_all_reduce, 2 * 4096), (simulated_all_reduce, None), (gloo_all_reduce, 2 * 4096)],
)
def test_each_all_reduce_counts_once_and_when_it_runs(
    monkeypatch: pytest.MonkeyPatch, all_reduce: Any, payload_bytes: int | None
) -> None:
    found = profiled(monkeypatch, all_reduce(1.0, 30.0) + all_reduce(2.0, 60.0))
    assert found.num_all_reduces == 2
    assert found.payload_bytes == payload_bytes
    spans = [(e["start_ms"], e["end_ms"]) for e in found.events if e["lane"] == "communication"]
    assert spans == [pytest.approx((30.0, 50.0)), pytest.approx((60.0, 80.0))]


def test_the_reducer_has_a_lane_for_what_the_host_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found = profiled(monkeypatch, annotated("ddp_compile::bucket_0_launch", 1.0, 30.0))
    spans = [(e["start_ms"], e["end_ms"]) for e in found.events if e["lane"] == "reducer"]
    assert spans == [pytest.approx((1.0, 1.1))]
    assert {e["name"] for e in found.events if e["lane"] == "compute"} == {"forward", "backward", "optimizer"}


def test_shards_are_under_way_until_they_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def host(name: str, start_ms: float, ms: float) -> list[dict[str, Any]]:
        return [event("user_annotation", f"ddp_compile::{name}", start_ms, ms)]

    events = [
        *host("bucket_0_gather_wait", 0.2, 0.1),  # of the step before
        *host("bucket_0_launch", 0.5, 0.1),
        *host("bucket_0_wait", 0.8, 0.1),
        *host("bucket_0_gather", 1.0, 0.1),
    ]
    found = profiled(monkeypatch, events)
    spans = [(e["name"], e["start_ms"], e["end_ms"]) for e in found.events if e["lane"] == "communication"]
    assert [name for name, _, _ in spans] == ["all-gather", "reduce-scatter", "all-gather"]
    assert [span[1:] for span in spans[:2]] == [pytest.approx((0.0, 0.3)), pytest.approx((0.5, 0.9))]
    assert spans[2][1:] == pytest.approx((1.0, found.step_ms))
