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
from models import loss_of
from rank_pool import Ranks
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future

from ddp_compile import ddp_compile
from ddp_compile.__main__ import main
from ddp_compile.algorithms import AlgorithmConfig
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


@pytest.mark.long  # its layers and its link sleep
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
