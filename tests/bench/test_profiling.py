"""Counting a step's all-reduces in its trace, tested with traces made by hand, since there may be no GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import bench_entries
import pytest

from ddp_compile.bench import profiling
from ddp_compile.bench.implementations import Implementation
from ddp_compile.bench.profiling import profile_step
from ddp_compile.bench.settings import WorkloadSettings
from ddp_compile.bench.training import Training
from ddp_compile.bench.workloads import Workload

PAYLOAD = {"Input Dims": [[1024]], "Input type": ["float"]}


def event(category: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": 0.0, "dur": 1.0, "args": arguments}


def annotated(name: str, **arguments: Any) -> list[dict[str, Any]]:
    """A range, and its copy over the kernels that were queued in it."""
    return [event("gpu_user_annotation", name, **arguments), event("user_annotation", name, **arguments)]


NCCL = [
    event("cpu_op", "c10d::allreduce_"),
    event("cpu_op", "record_param_comms"),
    *annotated("nccl:all_reduce", **PAYLOAD),
    event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
]
SIMULATED = [
    *annotated("simulated::all_reduce"),
    event("kernel", "at::cuda::(anonymous namespace)::spin_kernel(long)"),
]
GLOO = [event("cpu_op", "c10d::allreduce_"), event("user_annotation", "gloo:all_reduce", **PAYLOAD)]


@pytest.mark.parametrize(("all_reduce", "payload_bytes"), [(NCCL, 2 * 4096), (SIMULATED, None), (GLOO, 2 * 4096)])
def test_each_all_reduce_counts_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, all_reduce: list[Any], payload_bytes: int | None
) -> None:
    class Recorded:
        def __enter__(self) -> Recorded:
            return self

        def __exit__(self, *_: object) -> None: ...

        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_bytes(gzip.compress(json.dumps({"traceEvents": 2 * all_reduce}).encode()))

    monkeypatch.setattr(profiling, "profile", lambda **_: Recorded())
    workload = Workload(*bench_entries.tiny())
    implementation = Implementation(forward=workload.model)
    training = Training(implementation, workload.model, workload, WorkloadSettings(model="tiny"), 0, 1)
    found = profile_step(training, tmp_path / "trace.json.gz")
    assert (found.num_all_reduces, found.payload_bytes) == (2, payload_bytes)
