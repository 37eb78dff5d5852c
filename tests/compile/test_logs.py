"""What users see: the output of TORCH_LOGS, and warnings."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp
from process_copies import run_in_copy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from warned import warnings_of

import ddp_compile.module.explanation as explanation
from ddp_compile import ddp_compile
from ddp_compile.plan.spec import BucketPlan

TRAINING = """
import torch, torch.distributed as dist
from torch import nn
from ddp_compile import ddp_compile
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = ddp_compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), bucket_cap_mb=0.0002, backend="eager")
model(torch.randn(2, 8)).sum().backward()
"""


def train_with_logs() -> None:
    internal: Any = torch._logging._internal
    internal.LOG_TRACE_HANDLER = None
    internal._init_logs()  # which reads the environment, as it does when torch is imported
    exec(TRAINING, {})


def test_ddp_graphs_log_and_trace(tmp_path: Path) -> None:
    """So do the log of the passes and torch's trace; all in one process."""
    settings = {"TORCH_LOGS": "ddp_graphs,+ddp_compile.passes", "TORCH_TRACE": str(tmp_path)}
    ended = run_in_copy(train_with_logs, environment={**os.environ, **settings})
    printed = ended.stderr
    assert ended.exit_code == 0, printed
    for heading in ("buckets", "graph before", "graph after split_forward", "partition_0", "partition_1"):
        assert f"--- graph 0: {heading} ---" in printed, printed
    assert "bucket 0:" in printed and "2.bias, 2.weight" in printed
    assert "self.partition_1(" in printed
    assert "cut before" in printed and "so that bucket 0 is launched early" in printed
    assert "split_forward changed 2" in printed
    check_what_tlparse_makes_of(next(tmp_path.iterdir()), tmp_path / "report")


def check_what_tlparse_makes_of(trace: Path, report: Path) -> None:
    tlparse = Path(sys.executable).with_name("tlparse")
    subprocess.run([tlparse, trace, "--no-browser", "-o", report], check=True, capture_output=True, timeout=60)
    # tlparse numbers the files of a compilation.
    found = {re.sub(r"_\d+(?=\.\w+$)", "", path.name): path for path in report.glob("*/ddp_compile_*")}
    assert "bucket 0:" in found["ddp_compile_graph_0_buckets.txt"].read_text()
    assert "ddp_compile_graph_0_partition_1.txt" in found
    (name,) = [name for name in found if name.startswith("ddp_compile_plan_")]
    plan = BucketPlan.from_json(found[name].read_text())
    assert name == f"ddp_compile_plan_{plan.digest}.json" and len(plan.buckets) == 2
    index = (report / "index.html").read_text()
    assert all(path.name in index for path in found.values())


def test_silent_by_default() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    ended = run_in_copy(exec, TRAINING, {}, environment=environment)
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "", "")


def backward(model: Any, width: int = 64) -> None:
    model(torch.randn(2, width)).sum().backward()


@pytest.fixture
def two_ranks_in_name_only(monkeypatch: pytest.MonkeyPatch, single_rank_group: None) -> None:
    """A single rank has nothing to overlap, so there is no warning; pretend to be one of two ranks."""
    monkeypatch.setattr(explanation, "_needs_overlap", lambda process_group: True)


class CheckpointedWhole(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_uncut_model_warns_once(two_ranks_in_name_only: None) -> None:
    model = ddp_compile(CheckpointedWhole(64, 3), bucket_cap_mb=0.001, backend="aot_eager", split="forward")
    (warning,) = warnings_of(lambda: backward(model), times=3)
    assert "become ready all at once" in warning and "one node computes with gradients of both" in warning


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.parametrize("train", [lambda model, x: model.net(x), lambda model, x: model.forward(x)])
def test_uncalled_model_warns(
    train: Callable[[Any, Tensor], Tensor], evaluates: bool, two_ranks_in_name_only: None
) -> None:
    model = ddp_compile(WithBatchNorm(), bucket_cap_mb=0.001, backend="eager")
    if evaluates:
        with torch.no_grad():
            model.eval()(torch.randn(2, 64))
        model.train()
    (warning,) = warnings_of(lambda: train(model, torch.randn(2, 64)).sum().backward(), times=3)
    assert "the module itself has not been called for training" in warning and "no buffers are broadcast" in warning


@pytest.mark.parametrize("is_called", [True, False])
def test_training_a_part_warns(is_called: bool, single_rank_group: None) -> None:
    model = ddp_compile(WithBatchNorm(), backend="eager")

    def train() -> None:
        backward(model.net[:2])
        if is_called:  # the above is a regularizer then
            backward(model)

    warnings = warnings_of(train, times=10)
    assert len(warnings) == (not is_called)
    assert is_called or "the last one of 4 of 6 parameters" in warnings[0]
