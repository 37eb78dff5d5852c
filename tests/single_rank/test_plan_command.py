"""``python -m ddp_compile plan``: predictions, the line of code, a plan that can be trained with, and wrong input."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_compile import BucketPlan, ddp_compile
from ddp_compile.__main__ import main

LAYERS = 6


def net() -> Any:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(LAYERS))), torch.ones(2048, 512)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def with_unused() -> Any:
    return Unused(), torch.ones(1, 4)


def raises() -> Any:
    return nn.Linear(4, 4), torch.ones(1, 5)


def plan(capsys: pytest.CaptureFixture[str], function: str, *words: str) -> tuple[int, str, str]:
    status = main(["plan", f"{__name__}:{function}", *words])
    return status, *capsys.readouterr()


SLOW = ("--world-size", "8", "--bandwidth", "10gbit", "--latency", "20us", "--tflops", "1")


@pytest.mark.usefixtures("single_rank_group")
def test_the_optimal_plan_is_predicted_to_be_best_and_can_be_trained_with(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, chart = tmp_path / "plan.json", tmp_path / "chart.png"
    status, out, err = plan(capsys, "net", *SLOW, "--save", str(path), "--png", str(chart))
    assert (status, err) == (0, "")
    assert out.startswith(f"{2 * LAYERS} gradients, 6.0 MiB; ")
    assert "operations and bytes at 1 TFLOP/s and 1500 GB/s\n8 ranks, link: 10gbit, 20us, 1 ranks a node\n" in out
    times = {name.strip(): float(ms) for name, ms in re.findall(r"^(\S.*?)  +(\d+\.\d\d) ", out, re.MULTILINE)}
    assert len(times) == 11 and times["optimal boundaries"] < times["buckets of 100 MiB"]
    assert times["optimal boundaries"] <= min(time for name, time in times.items() if "bucket" in name)
    best = re.search(r"best with the same gradients: (.*), [\d.]+ times as fast as the default\n    (.*)\n", out)
    assert best is not None and (best[1] != "optimal boundaries" or f'bucket_plan="{path}"' in best[2])
    assert chart.read_bytes().startswith(b"\x89PNG")
    saved = BucketPlan.load(path)
    model: Any = ddp_compile(net()[0], backend="eager", bucket_plan=path)
    model(torch.ones(2, 512)).sum().backward()
    assert model.bucket_plan == saved and 1 < len(saved.buckets) < 2 * LAYERS
    assert max(bucket.num_bytes for bucket in saved.buckets) > 1.05 * 2**20
    assert plan(capsys, "net", *SLOW, "--save", str(path), "--max-bucket-cap-mb", "1.05")[0] == 0
    assert max(bucket.num_bytes for bucket in BucketPlan.load(path).buckets) <= 1.05 * 2**20


@pytest.mark.parametrize(
    ("function", "words", "said"),
    [
        ("net", ("--world-size", "8"), "the speed of the link is not known; pass --bandwidth, for example 100gbit"),
        ("net", (*SLOW, "--max-bucket-cap-mb", "0"), "--max-bucket-cap-mb=0.0 must be a positive number of MiB"),
        ("net", ("--world-size", "1", "--bandwidth", "1gbit"), "world_size=1 must be at least 2"),
        ("net", (*SLOW, "--intra-node", "3"), "ranks_per_node=3 must be at least 1 and divide world_size=8"),
        ("net", (*SLOW, "--latency", "0us"), "latency='0us' must be a number above zero with the unit us, ms or s"),
        ("net", (*SLOW, "--bandwidth", "0gbit"), "rate='0gbit' must be a number with the unit mbit or gbit"),
        ("net", (*SLOW, "--tflops", "inf"), "--tflops inf must be above zero and finite"),
        ("net", (*SLOW, "--bandwidth", "none"), "--bandwidth none is not a rate; pass for example 100gbit"),
        ("net", (*SLOW, "--profile", "/no/such"), "--profile /no/such cannot be read: "),
        ("net", (*SLOW, "--save", "/no/such/file"), "/no/such/file cannot be written, since there is no folder"),
        ("raises", SLOW, "the forward raised, on fake tensors, which have no values"),
        ("with_unused", SLOW, "2 of 4 parameters get no gradient in the backward"),
        ("missing", SLOW, "cannot be imported"),
    ],
)
def test_wrong_input_is_refused_by_name(
    function: str, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = plan(capsys, function, *words)
    assert (status, out) == (2, "") and err.startswith("plan: ") and said in err
