"""``model.measure()`` on two ranks: what is recorded, late ranks, and ranks that do not measure."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, loss_of
from rank_pool import on_ranks
from torch import nn

from ddp_compile import ddp_compile
from ddp_compile.report.steps import StepReport
from ddp_compile.sharded_optimizer import shard_optimizer


def replicate(**settings: Any) -> Any:
    return ddp_compile(Mlp(width=33, num_layers=4), bucket_cap_mb=0.005, backend="aot_eager", **settings)


def step(model: nn.Module) -> None:
    loss_of(model(torch.randn(6, 33))).backward()


@on_ranks(2)
def test_default(split: str) -> None:
    model = replicate(split=split)
    measurement = model.measure(steps=3)
    assert model.comm_stats() is None
    for _ in range(7):
        step(model)
        print(measurement.num_steps, measurement.is_complete, model.comm_stats())
    print(measurement.report())
    r = measurement.report()
    print(len(r.to_json()))
    assert StepReport.from_json(r.to_json()) == r
    print(r.steps[-1].ranks[dist.get_rank()])

@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_sharded() -> None:
    model = replicate()
    opt = shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    for i in range(5):
        if i==1:
            measurement = model.measure(steps=3)
        step(model)
        opt.step()
        opt.zero_grad()
    print(measurement.report())
    print(measurement.report().steps[-1].ranks[dist.get_rank()])
    with pytest.raises(ZeroDivisionError): 1/0
