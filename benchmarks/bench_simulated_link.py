"""Whole training steps with communication that slows no computation: one rank on a simulated link.

    python benchmarks/bench_simulated_link.py [--model gpt-medium] [--optimizer adamw] [--rate 5.3e9] [--rounds 30]
        [--output FILE.csv]

Every implementation has its own process, and takes a turn of a few steps in each round while the others sleep. It
prints milliseconds of a step including the optimizer, and the median over the rounds of the ratio to the best peer, the
one with the smallest median. "again" is a second process of that peer, which shows the noise of the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import torch
import torch.multiprocessing as mp

from ddp_compile.bench.implementations import OURS_PREFIX, implementation_named
from ddp_compile.bench.report import report_rows
from ddp_compile.bench.results import median_and_interval
from ddp_compile.bench.settings import Case, WorkloadSettings
from ddp_compile.bench.simulated_link import LinkModel, init_simulated_process_group
from ddp_compile.bench.training import OPTIMIZERS, Training
from ddp_compile.bench.workloads import make_workload

NUM_WARM = 12  #: steps before the first round, which include agreement points 1, 2, 4 and 8
STEPS_OF_A_TURN = 4  #: the first one is not timed
DEFAULT = "ddp-eager,compile-ddp,ddp-inner-compile,ddp_compile-forward,ddp_compile-backward"


class Steps(Protocol):
    """What trains."""

    def step(self) -> object: ...


#: Makes the training of one name, in the process that measures it.
Make = Callable[[str, argparse.Namespace], Steps]


def make_training(implementation: str, arguments: argparse.Namespace) -> Training:
    settings = WorkloadSettings(model=arguments.model, optimizer=arguments.optimizer, device="cpu")
    workload = make_workload(settings)
    case = Case(implementation=implementation, bucket_cap_mb=arguments.bucket_cap_mb)
    built = implementation_named(implementation)(workload.model, case)
    training = Training(built, workload.model, workload, settings, 0, 1)
    if arguments.zero_gradients:
        for optimizer in training.optimizers:
            optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)  # type: ignore[method-assign]
    return training


def serve(turns: Connection, make: Make, name: str, arguments: argparse.Namespace) -> None:
    """The process of one name: takes a turn for each message, and answers with the seconds of its steps."""
    torch.set_num_threads(arguments.threads)
    init_simulated_process_group(LinkModel.from_rate(arguments.rate, arguments.ranks), torch.device("cpu"))
    training = make(name, arguments)
    for _ in range(NUM_WARM):
        training.step()
    turns.send("ready")
    while turns.recv():
        training.step()
        seconds = []
        for _ in range(STEPS_OF_A_TURN - 1):
            start = time.perf_counter()
            training.step()
            seconds.append(time.perf_counter() - start)
        turns.send(seconds)


def measure(make: Make, names: list[str], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """The median step of each round in seconds, by name.

    Args:
        make: Makes the training of a name. Another process must be able to import it.
        names: Its arguments; a name that is measured twice has ``" again"`` at the end.
        arguments: Those of `add_arguments`, and the script's own.
    """
    context = mp.get_context("spawn")
    connections = {}
    for name in names:
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, make, name.removesuffix(" again"), arguments), daemon=True).start()
        connections[name] = ours
        ours.recv()  # one at a time, so that each compiles alone
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            connections[name].send(True)
            times[name].append(statistics.median(connections[name].recv()))
    for connection in connections.values():
        connection.send(False)
    return times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gpt-medium")
    parser.add_argument("--rate", type=float, default=5.3e9, help="bits a second")
    parser.add_argument("--ranks", type=int, default=2, help="simulated ranks")
    parser.add_argument("--bucket-cap-mb", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="OpenMP threads of a process")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")


def compare(times: dict[str, list[float]], best: str) -> list[dict[str, object]]:
    """A row for each name: its milliseconds, and the ratio to one of the names with its interval."""
    rows = []
    for name, seconds in times.items():
        ratio, low, high = median_and_interval(a / b for a, b in zip(seconds, times[best], strict=True))
        row: dict[str, object] = {"name": name, "step_ms": round(1000 * statistics.median(seconds), 1)}
        rows.append(row | {"ratio": round(ratio, 4), "from": round(low, 4), "to": round(high, 4)})
    return rows


def report(rows: list[dict[str, object]], best: str, arguments: argparse.Namespace) -> None:
    about = {"bits_per_second": f"{arguments.rate:g}", "bucket_cap_mb": f"{arguments.bucket_cap_mb:g}"}
    report_rows(rows, arguments.output, model=arguments.model, **about, ratio_to=best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--implementations", default=DEFAULT)
    parser.add_argument("--again", default="ddp-inner-compile", help="implementation that is measured twice")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--zero-gradients", action="store_true", help="zero_grad(set_to_none=False)")
    arguments = parser.parse_args()
    names = arguments.implementations.split(",")
    if arguments.again:
        names.append(f"{arguments.again} again")
    times = measure(make_training, names, arguments)
    peers = [name for name in names if not name.startswith(OURS_PREFIX) and not name.endswith(" again")]
    best = min(peers, key=lambda name: statistics.median(times[name]))
    report(compare(times, best), best, arguments)


if __name__ == "__main__":
    main()
