"""A report of ``model.measure()`` as the ``--profile`` of ``python -m ddp_compile plan``."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, loss_of
from rank_pool import Ranks

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.__main__ import main
from ddp_compile.commands import plan as plan_command
from ddp_compile.plan.costs import Collective
from ddp_compile.report.costs import computation_of
from ddp_compile.report.steps import StepReport

WIDTH = 257
ALL_REDUCE, SHARDED = "gradient all-reduce", "sharded optimizer"


def net() -> Any:
    torch.manual_seed(1)
    return Mlp(WIDTH, 4), torch.ones(8, WIDTH)


def measured(is_sharded: bool, split: str = "auto", loss_s: float = 0.0) -> str:
    module, _ = net()
    model: Any = ddp_compile(module, bucket_cap_mb=[0.2, 0.6], backend="aot_eager", split=split)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if is_sharded:
        shard_optimizer(optimizer, model)
    measurement = model.measure(steps=8)
    for step in range(10):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = loss_of(model(torch.randn(8, WIDTH)))
        time.sleep(loss_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return measurement.report().to_json()


@pytest.mark.parametrize("is_sharded", only([True], [False, True]))
def test_a_measured_report_is_a_profile(
    ranks: Ranks, capsys: pytest.CaptureFixture[str], tmp_path: Path, is_sharded: bool
) -> None:
    path, plan = tmp_path / "report.json", tmp_path / "plan.json"
    path.write_text(ranks(2).run(measured, is_sharded)[0])
    link = ("--world-size", "2", "--bandwidth", "1gbit", "--latency", "20us")
    assert main(["plan", f"{__name__}:net", "--profile", str(path), "--save", str(plan), *link]) == 0
    out, err = capsys.readouterr()
    assert not err and out.startswith("8 gradients, 1.0 MiB; ")
    assert ("its optimizer's time is not known and left out" in out) != is_sharded
    times = {name.strip(): float(ms) for name, ms in re.findall(r"^(\S.*?)  +(\d+\.\d\d) ", out, re.MULTILINE)}
    assert times["optimal boundaries"] <= times["default buckets"]
    assert f"{plan} has the plan of: " in out and plan.exists() and "ring" in out

    # Without --bandwidth an all-reduce is known, but not a message between two ranks.
    without = main_on(path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(plan_command, "all_reduce_of", lambda *_: Collective(latency_s=1e-5, s_per_byte=1e-9))
        assert without() == 0
    out, err = capsys.readouterr()
    assert not err and "1000.0 us/MB for an all-reduce" in out and "LocalSGD" in out and "ring" not in out

    path.write_text(path.read_text().replace(f'"{SHARDED if is_sharded else ALL_REDUCE}"', '"ByteGrad"'))
    assert without() == 2
    _, err = capsys.readouterr()
    assert "the profile is of the algorithm 'ByteGrad', whose transfers do not tell what an all-reduce takes" in err


@pytest.mark.parametrize("split", only(["forward"], ["forward", "backward"]))
def test_a_sharded_forward_reads_its_last_parameters_before_a_long_loss(ranks: Ranks, split: str) -> None:
    loss_s = 0.2
    report = StepReport.from_json(ranks(2).run(measured, True, split, loss_s)[0])
    parameters = dict(net()[0].named_parameters())
    computation = computation_of(report, list(parameters), [parameter.nbytes for parameter in parameters.values()])
    assert computation.forward_s > loss_s
    needed_of = dict(zip(parameters, computation.needed_s, strict=True))
    for bucket in report.buckets:  # if the forward mirrored the backward, the first bucket would come after the loss
        assert min(needed_of[name] for name in bucket.names) < loss_s / 2


def main_on(profile: Path) -> Callable[[], int]:
    return lambda: main(["plan", f"{__name__}:net", "--profile", str(profile), "--world-size", "2"])
