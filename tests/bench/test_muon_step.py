"""The benchmark of the optimizer's step with Muon: what its rows are made of."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import on_ranks

from ddp_compile.bench.settings import WorkloadSettings
from ddp_compile.runtime.sharded.owners import cost_of

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "bench_muon.py"))


def test_rows_are_of_the_slowest_rank_beside_the_replicated_step() -> None:
    def rank(replicated: list[list[float]], sharded: list[list[float]], cost: float, num_bytes: int) -> Any:
        return SCRIPT["OnRank"](replicated, sharded, cost, num_bytes, 4 * 2**20)

    rounds = 3
    ranks = [
        rank([[0.1, 0.9]] * rounds, [[0.1, 0.5]] * rounds, 10.0, 2**20),
        rank([], [[0.05, 0.3]] * rounds, 30.0, 3 * 2**20),
    ]
    replicated, sharded = SCRIPT["rows_of"](2, ranks)
    assert (replicated["step_ms"], sharded["step_ms"]) == (1000, 600)
    assert sharded["ratio"] == sharded["from"] == sharded["to"] == 0.6
    assert (sharded["cost_max_mean"], sharded["muon_max_mean"]) == (1.5, 1.25)
    assert (replicated["states_mib"], sharded["states_mib"]) == (4, 3)


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_ranks_share_cost_and_states_of_the_replicated_step() -> None:
    settings = WorkloadSettings(model="gpt-small", depth=2, width=64, batch_size=1, optimizer="muon-float32")
    arguments = argparse.Namespace(optimizer=settings.optimizer, cpu_time=False)
    sharded, replicated = SCRIPT["Sharded"](settings), SCRIPT["Replicated"](settings)
    sharded.backward()
    num_bytes = [SCRIPT["first_step_bytes"](each.optimizers, arguments) for each in (sharded, replicated)]
    for _ in range(2):
        sharded.backward()
        for each in (sharded, replicated):
            seconds = SCRIPT["timed"](each.optimizers, arguments)
            assert len(seconds) == 2 and min(seconds) > 0
    *_, muon = replicated.optimizers
    whole = sum(cost_of(muon, group, p) for group in muon.param_groups for p in group["params"])
    of_all: list[Any] = [None, None]
    dist.all_gather_object(of_all, (sharded.own_cost(), num_bytes[0]))
    costs, shards = zip(*of_all, strict=True)
    assert sum(costs) == whole and max(costs) < 0.6 * whole
    # A momentum for each element of Muon, two moments for each of AdamW, and a number of steps for each parameter.
    matrices = sum(p.numel() for p in muon.param_groups[0]["params"])
    others = [p.numel() for p in replicated.optimizers[0].param_groups[0]["params"]]
    assert num_bytes[1] == 4 * (matrices + 2 * sum(others) + len(others))
    assert sum(shards) == pytest.approx(num_bytes[1], rel=0.01)  # both count the steps of a parameter that is cut
    assert max(shards) < 0.55 * sum(shards)
