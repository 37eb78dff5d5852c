"""What a step costs the host: a model of many tiny layers, where kernels take no time, beside torch.compile(DDP).

    python benchmarks/bench_host.py [--gradients 16,128,1000] [--rounds 100] [--output FILE.csv]

The time is that of each rank's main thread, without waits, so that neither gloo's threads nor the other rank count; on
a GPU it is what a launch-bound step takes. All ways train in turns in the same processes, on two ranks with a core
each. It prints the median of each part of a step in milliseconds, and the median ratio to torch.compile(DDP) over the
rounds with its 95 % interval.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile
from ddp_compile.bench.report import report_rows
from ddp_compile.bench.results import median_and_interval

WIDTH = 8
WARM_UP = 10
PARTS = ("forward", "backward", "zero_grad")

ALONE, DDP = "torch.compile", "torch.compile(DDP)"
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    ALONE: torch.compile,
    DDP: lambda net: torch.compile(DistributedDataParallel(net, gradient_as_bucket_view=True)),
    "ddp_compile, forward split": lambda net: ddp_compile(net, split="forward"),
    "ddp_compile, backward split": lambda net: ddp_compile(net, split="backward"),
}


class Layers(nn.Module):
    """Not an ``nn.Sequential``, whose forward torch.compile(DDP) leaves to Python."""

    def __init__(self, num_gradients: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_gradients // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def step_s(model: Any, x: torch.Tensor) -> list[float]:
    """Seconds of the main thread in each of `PARTS`."""
    readings = [time.thread_time()]
    loss = model(x).sum()
    readings.append(time.thread_time())
    loss.backward()
    readings.append(time.thread_time())
    model.zero_grad()
    readings.append(time.thread_time())
    return [end - begin for begin, end in pairwise(readings)]


def measure(num_gradients: int, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of each part of each step of this rank, by way; all ways in turns."""
    models = {name: make(Layers(num_gradients)) for name, make in WAYS.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    x = torch.ones(4, WIDTH)
    for i in range(WARM_UP + rounds):
        order = list(models)[i % len(models) :] + list(models)[: i % len(models)]
        for name in order:
            dist.barrier()
            seconds = step_s(models[name], x)
            if i >= WARM_UP:
                times[name].append(seconds)
    return times


def row_of(num_gradients: int, name: str, times: dict[str, list[list[float]]]) -> dict[str, object]:
    by_part = zip(*times[name], strict=True)
    medians = {f"{part}_ms": round(1000 * statistics.median(s), 3) for part, s in zip(PARTS, by_part, strict=True)}
    steps = {way: [sum(step) for step in times[way]] for way in (name, DDP)}
    ratio, low, high = median_and_interval(a / b for a, b in zip(steps[name], steps[DDP], strict=True))
    return {
        "gradients": num_gradients,
        "way": name,
        "step_ms": round(1000 * statistics.median(steps[name]), 3),
        **medians,
        "x_ddp": round(ratio, 3),
        "x_ddp_from": round(low, 3),
        "x_ddp_to": round(high, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradients", default="16,128,1000", help="numbers of gradients, with commas")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    rows = []
    for num_gradients in map(int, arguments.gradients.split(",")):
        times = on_ranks(2, measure, num_gradients, arguments.rounds)[0]
        rows += [row_of(num_gradients, name, times) for name in WAYS]
    report_rows(rows, arguments.output)


if __name__ == "__main__":
    main()
