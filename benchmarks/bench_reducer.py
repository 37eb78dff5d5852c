"""The cost of the reducer: the backward of a model with many small parameters, compared with DistributedDataParallel.

    python benchmarks/bench_reducer.py [--parameters 1000] [--rounds 60] [--output FILE.csv]

Both run eagerly, so that only the reducers differ, in turns, on one core for each rank. It prints, for one rank and for
two, the milliseconds of a backward (of the slower rank), and the median ratio over the rounds with its 95 % interval.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile
from ddp_compile.bench.report import report_rows
from ddp_compile.bench.results import median_and_interval

NUMEL = 16
WARM_UP = 10


class ManySmall(nn.Module):
    """A chain of products with one small parameter each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(NUMEL)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = x * factor
        return x


def plain(count: int) -> nn.Module:
    return ManySmall(count)


def with_ddp(count: int) -> nn.Module:
    return DistributedDataParallel(ManySmall(count), gradient_as_bucket_view=True, batched_grad_copy=True)


def with_ours(count: int) -> nn.Module:
    return ddp_compile(ManySmall(count), backend="eager")


NO_REDUCER, DDP, OURS = "no reducer", "DDP", "ddp_compile"
WAYS: dict[str, Callable[[int], nn.Module]] = {NO_REDUCER: plain, DDP: with_ddp, OURS: with_ours}


def backward_s(model: nn.Module) -> float:
    loss = model(torch.ones(NUMEL)).sum()
    start = time.perf_counter()
    loss.backward()
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds


def measure(count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each backward on the slower rank, by way; all ways in turns."""
    models = {name: make(count) for name, make in WAYS.items()}
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for i in range(WARM_UP + rounds):
        order = list(models)[i % len(models) :] + list(models)[: i % len(models)]
        for name in order:
            dist.barrier()
            slowest = torch.tensor([backward_s(models[name])], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if i >= WARM_UP:
                times[name].append(slowest.item())
    return times


def row_of(world_size: int, name: str, times: dict[str, list[float]]) -> dict[str, object]:
    p20, p50, p80 = (statistics.quantiles(times[name], n=10, method="inclusive")[i] for i in (1, 4, 7))
    ratio, low, high = median_and_interval(a / b for a, b in zip(times[name], times[DDP], strict=True))
    return {
        "ranks": world_size,
        "reducer": name,
        "p20_ms": round(1000 * p20, 3),
        "p50_ms": round(1000 * p50, 3),
        "p80_ms": round(1000 * p80, 3),
        "x_ddp": round(ratio, 4),
        "x_ddp_from": round(low, 4),
        "x_ddp_to": round(high, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    rows = []
    for world_size in (1, 2):
        times = on_ranks(world_size, measure, arguments.parameters, arguments.rounds)[0]
        rows += [row_of(world_size, name, times) for name in WAYS]
    report_rows(rows, arguments.output)


if __name__ == "__main__":
    main()
