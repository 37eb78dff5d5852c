"""Mean steps of whole cycles of DiLoCo on a slow simulated link, beside computation alone and the all-reduce.

    python benchmarks/bench_diloco.py [--model gpt-small] [--rate 1e8] [--sync-every 100] [--rounds 3]

Each round, every way to train takes as many steps as a cycle has, so that a slow moment falls on all of them. What a
cycle sends is in its mean, wherever in the cycle it is sent. The optimizer is AdamW, and its steps are timed too.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ddp_compile import ddp_compile
from ddp_compile.algorithms import DiLoCo
from ddp_compile.bench.implementations import Implementation
from ddp_compile.bench.report import report_rows
from ddp_compile.bench.settings import WorkloadSettings
from ddp_compile.bench.simulated_link import LinkModel, init_simulated_process_group, set_link_model
from ddp_compile.bench.training import Training
from ddp_compile.bench.workloads import make_workload

#: ``torch.compile`` of the model, which sends nothing.
ALONE = "computation alone"


def settings_of(sync_every: int) -> dict[str, dict[str, Any]]:
    delayed = {"fragments": 4, "fragment_sync_delay": min(10, sync_every - 1), "fragment_update_alpha": 0.5}
    return {
        ALONE: {},
        "all-reduce": {},
        "DiLoCo": {"algorithm": DiLoCo(sync_every=sync_every)},
        "DiLoCo, 4 fragments, delayed": {"algorithm": DiLoCo(sync_every=sync_every, **delayed)},
        "DiLoCo, eight bits": {"algorithm": DiLoCo(sync_every=sync_every, wire_dtype=torch.uint8)},
    }


def train(model: str, name: str, settings: dict[str, Any]) -> Training:
    chosen = WorkloadSettings(model=model, optimizer="adamw", device="cpu")
    workload = make_workload(chosen)
    compiled: Any = torch.compile(workload.model) if name == ALONE else ddp_compile(workload.model, **settings)
    return Training(Implementation(forward=compiled), workload.model, workload, chosen, 0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-small")
    parser.add_argument("--rate", type=float, default=1e8, help="bits a second")
    parser.add_argument("--ranks", type=int, default=2, help="simulated ranks")
    parser.add_argument("--sync-every", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    init_simulated_process_group(LinkModel.from_rate(1e13, arguments.ranks), torch.device("cpu"))
    trainings = {
        name: train(arguments.model, name, settings) for name, settings in settings_of(arguments.sync_every).items()
    }
    for training in trainings.values():
        for _ in range(arguments.sync_every):  # so that every one begins a cycle, and all are compiled
            training.step()
    set_link_model(LinkModel.from_rate(arguments.rate, arguments.ranks))
    times: dict[str, list[float]] = {name: [] for name in trainings}
    for _ in range(arguments.rounds):
        for name, training in trainings.items():
            steps = min(5, arguments.sync_every) if name == "all-reduce" else arguments.sync_every
            began = time.perf_counter()
            for _ in range(steps):
                training.step()
            times[name].append((time.perf_counter() - began) / steps)
    alone = times[ALONE]
    rows = [
        {
            "name": name,
            "step_ms": round(1e3 * median(found), 1),
            "to_alone": round(median(a / b for a, b in zip(found, alone, strict=True)), 3),
        }
        for name, found in times.items()
    ]
    about = {"bits_per_second": f"{arguments.rate:g}", "sync_every": str(arguments.sync_every)}
    report_rows(rows, arguments.output, model=arguments.model, ranks=str(arguments.ranks), **about)


if __name__ == "__main__":
    main()
