"""The step time of fast ranks while one rank is slow, with an all-reduce and with asynchronous averaging.

    python benchmarks/bench_slow_rank.py [--model gpt-small] [--slower 3] [--rounds 10] [--output FILE.csv]

The last rank sleeps in every step, so that it takes ``--slower`` times as long as the others. Each way has its own
model on every rank, and takes a turn in each round, in which the slow rank takes as many steps as it can. "alone" is
training without any communication. It prints milliseconds of a step on rank 0, and the median over the rounds of its
speed as a share of "alone". With two ranks on two cores, the thread that averages and gloo's threads take time from the
cores that compute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from ddp_compile import ddp_compile
from ddp_compile.algorithms import AsyncModelAverage, GradientAllReduce
from ddp_compile.bench.implementations import Implementation
from ddp_compile.bench.report import report_rows
from ddp_compile.bench.results import median_and_interval
from ddp_compile.bench.settings import WorkloadSettings
from ddp_compile.bench.training import Training
from ddp_compile.bench.workloads import make_workload

NUM_WARM = 4


class Way:
    """One model on this rank.

    Args:
        make: Makes the training of a plain module.
        model: Name of the workload.
        rank: This rank.
    """

    def __init__(self, make: Callable[[nn.Module], nn.Module], model: str, rank: int) -> None:
        settings = WorkloadSettings(model=model, device="cpu")
        workload = make_workload(settings)
        self.model: Any = make(workload.model)
        built = Implementation(forward=self.model)
        self.training = Training(built, workload.model, workload, settings, rank, 1)

    def step(self, sleep_s: float) -> float:
        """One step, and a pause; returns the seconds of both."""
        start = time.perf_counter()
        self.training.step()
        time.sleep(sleep_s)
        return time.perf_counter() - start


def ways(arguments: argparse.Namespace) -> dict[str, Callable[[nn.Module], nn.Module]]:
    asynchronous = AsyncModelAverage(sync_interval_ms=arguments.sync_interval_ms, warmup_steps=2)
    return {
        "alone": torch.compile,
        "all-reduce": lambda module: ddp_compile(module, algorithm=GradientAllReduce()),
        "async": lambda module: ddp_compile(module, algorithm=asynchronous),
    }


def turn(name: str, way: Way, sleep_s: float, arguments: argparse.Namespace) -> list[float]:
    """The seconds of this rank's steps. Ranks whose steps wait for each other take equally many."""
    seconds = []
    if name == "async":
        way.model.comm_algorithm.resume()
    if name == "all-reduce":
        seconds = [way.step(sleep_s) for _ in range(arguments.steps // 2)]
    else:
        end = time.perf_counter() + arguments.turn_s
        while time.perf_counter() < end:
            seconds.append(way.step(sleep_s))
    if name == "async":
        way.model.comm_algorithm.abort()
    return seconds[1:]


def rank_of_world(rank: int, arguments: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", arguments.port, arguments.ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    is_slow = rank == arguments.ranks - 1
    all_ways = {name: Way(make, arguments.model, rank) for name, make in ways(arguments).items()}
    rounds: list[dict[str, float]] = []
    sleep_s = 0.0
    for name, way in all_ways.items():
        for _ in range(NUM_WARM):
            way.step(0.0)
        if name == "async":
            way.model.comm_algorithm.abort()
    for number in range(arguments.rounds + 1):
        of_round = {}
        for name, way in all_ways.items():
            dist.barrier()
            of_round[name] = statistics.median(turn(name, way, sleep_s, arguments))
        if number == 0:  # without a pause, to find out how long the pauses have to be
            sleep_s = of_round["alone"] * (arguments.slower - 1) if is_slow else 0.0
        else:
            rounds.append(of_round)
    averages = all_ways["async"].model.comm_algorithm.num_rounds
    if rank == 0:
        results.put((rounds, averages))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slower", type=float, default=3.0, help="how many times as long the last rank's steps take")
    parser.add_argument("--sync-interval-ms", type=float, default=500.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=16, help="steps of an all-reduce turn, twice")
    parser.add_argument("--turn-s", type=float, default=4.0, help="seconds of a turn of the others")
    parser.add_argument("--port", type=int, default=29641)
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(rank_of_world, (arguments, results), arguments.ranks)
    rounds, averages = results.get()
    rows = []
    for name in rounds[0]:
        speed, low, high = median_and_interval(each["alone"] / each[name] for each in rounds)
        milliseconds = 1000 * statistics.median(each[name] for each in rounds)
        rows.append({"way": name, "step_ms": round(milliseconds, 1), "speed": round(speed, 3)})
        rows[-1] |= {"from": round(low, 3), "to": round(high, 3)}
    print(f"{averages} averages")
    about = {"ranks": arguments.ranks, "slower": arguments.slower, "interval_ms": arguments.sync_interval_ms}
    report_rows(rows, arguments.output, model=arguments.model, **about)


if __name__ == "__main__":
    main()
