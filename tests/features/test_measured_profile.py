"""From ``model.measure()`` by ``python -m ddp_compile plan --profile`` to a step that is shorter."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, loss_of
from rank_pool import Ranks
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.__main__ import main
from ddp_compile.algorithms import AlgorithmConfig
from ddp_compile.plan.costs import Collective
from ddp_compile.report.costs import costs_of
from ddp_compile.report.step_report import StepReport
from ddp_compile.runtime.algorithms.all_reduce import AllReduce

#: A layer has 1 MiB of weights. Its backward and the transfer of its gradients take this long.
LAYER_S = 0.04
WIDTH, NUM_LAYERS = 512, 5


class SlowLink(AllReduce):
    """An all-reduce over a link that sends one bucket at a time."""

    _link = threading.Lock()

    def launch(self, bucket: Any, is_last: bool) -> Any:
        def send(done: Any) -> Any:
            with self._link:
                time.sleep(bucket.spec.num_bytes / 2**20 * LAYER_S)
            return done.value()

        work: Any = super().launch(bucket, is_last)
        return _create_work_from_future(work.get_future().then(send))


class OverSlowLink(AlgorithmConfig):
    def build(self, process_group: dist.ProcessGroup) -> AllReduce:
        return SlowLink(process_group)


def net() -> Any:
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*layers), torch.ones(4, WIDTH)


def measured_step(plan: str | None) -> tuple[str, float, int]:
    """The report of some steps, the median of how long they took, and the number of graphs."""
    module, inputs = net()
    for parameter in module.parameters():
        parameter.register_hook(lambda _: time.sleep(LAYER_S))
    model: Any = ddp_compile(module, bucket_plan=plan, algorithm=OverSlowLink(), backend="aot_eager")
    for _ in range(2):
        loss_of(model(inputs)).backward()
    with model.measure(steps=None) as measurement:
        for _ in range(5):
            loss_of(model(inputs)).backward()
    report = measurement.report()
    return report.to_json(), median(step.duration_s for step in report.steps), len(model.explain().graphs)


def test_plan_from_measured_steps(ranks: Ranks, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile, plan = tmp_path / "report.json", tmp_path / "plan.json"
    report, default_s, _ = ranks(2).run(measured_step, None)[0]
    profile.write_text(report)
    assert main(["plan", "--profile", str(profile), "--save", str(plan)]) == 0
    out, err = capsys.readouterr()
    assert not err and f"{plan} has the plan of: " in out
    _, planned_s, num_graphs = ranks(2).run(measured_step, str(plan))[0]
    # The default sends four layers after the last one has been computed, a good plan one or two.
    assert planned_s < default_s - LAYER_S and num_graphs == 1


def sharded_steps(split: str, loss_s: float) -> str:
    torch.manual_seed(1)
    model: Any = ddp_compile(Mlp(257, 4), bucket_cap_mb=[0.2, 0.6], backend="aot_eager", split=split)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    shard_optimizer(optimizer, model)
    measurement = model.measure(steps=8)
    for step in range(10):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = loss_of(model(torch.randn(8, 257)))
        time.sleep(loss_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return measurement.report().to_json()


@pytest.mark.parametrize("split", only(["forward"], ["forward", "backward"]))
def test_needs_of_a_sharded_forward(ranks: Ranks, split: str) -> None:
    loss_s = 0.2
    report = StepReport.from_json(ranks(2).run(sharded_steps, split, loss_s)[0])
    costs = costs_of(report, Collective(latency_s=1e-5, s_per_byte=1e-9))
    assert costs.forward_s > loss_s and costs.step_s_per_byte
    for bucket in report.plan.buckets:  # if the forward mirrored the backward, the first one would come after the loss
        assert min(costs.needed_s[gradient.index] for gradient in bucket.gradients) < loss_s / 2
