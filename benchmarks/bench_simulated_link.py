"""Whole training steps where communication costs no computation: one rank on a link that only takes time.

    python benchmarks/bench_simulated_link.py [--model gpt-medium] [--rate 5.3e9] [--rounds 30] [--output FILE.csv]

Every implementation has a process of its own, and takes its turn of a few steps in each round while the others sleep.
Printed are milliseconds of a step with its optimizer, and the median over the rounds of the ratio to the best peer: the
one whose median is the smallest. "again" is a second process of that peer, which says what the machine resolves.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.multiprocessing as mp
from tabulate import tabulate

from ddp_compile.bench.implementations import OURS_PREFIX, implementation_named
from ddp_compile.bench.provenance import commit, processor
from ddp_compile.bench.report import write_csv
from ddp_compile.bench.results import median_and_interval
from ddp_compile.bench.settings import Case, WorkloadSettings
from ddp_compile.bench.simulated_link import LinkModel, init_simulated_process_group
from ddp_compile.bench.training import Training
from ddp_compile.bench.workloads import make_workload

NUM_WARM = 12  #: steps before the first round, in which agreement points 1, 2, 4 and 8 lie
STEPS_OF_A_TURN = 4  #: of which the first one is not timed
DEFAULT = "ddp-eager,compile-ddp,ddp-inner-compile,ddp_compile-forward,ddp_compile-backward"


def serve(turns: Connection, implementation: str, arguments: argparse.Namespace) -> None:
    """One implementation: a turn for each message, answered with the seconds of its steps."""
    torch.set_num_threads(arguments.threads)
    init_simulated_process_group(LinkModel.from_rate(arguments.rate, arguments.ranks), torch.device("cpu"))
    settings = WorkloadSettings(model=arguments.model, optimizer="adamw", device="cpu")
    workload = make_workload(settings)
    case = Case(implementation=implementation, bucket_cap_mb=arguments.bucket_cap_mb)
    built = implementation_named(implementation)(workload.model, case)
    training = Training(built, workload.model, workload, settings, 0, 1)
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


def measure(names: list[str], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """The median step of each round in seconds, by name."""
    context = mp.get_context("spawn")
    connections = {}
    for name in names:
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, name.removesuffix(" again"), arguments), daemon=True).start()
        connections[name] = ours
        ours.recv()  # one after the other, so that they compile alone
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            connections[name].send(True)
            times[name].append(statistics.median(connections[name].recv()))
    for connection in connections.values():
        connection.send(False)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-medium")
    parser.add_argument("--rate", type=float, default=5.3e9, help="bits a second")
    parser.add_argument("--ranks", type=int, default=2, help="ranks that are pretended")
    parser.add_argument("--bucket-cap-mb", type=float, default=5.0)
    parser.add_argument("--implementations", default=DEFAULT)
    parser.add_argument("--again", default="ddp-inner-compile", help="implementation that is measured twice")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="OpenMP threads of a process")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    names = arguments.implementations.split(",")
    if arguments.again:
        names.append(f"{arguments.again} again")
    times = measure(names, arguments)
    peers = [name for name in names if not name.startswith(OURS_PREFIX) and not name.endswith(" again")]
    best = min(peers, key=lambda name: statistics.median(times[name]))
    rows = []
    for name in names:
        ratio, low, high = median_and_interval(a / b for a, b in zip(times[name], times[best], strict=True))
        row: dict[str, object] = {"implementation": name, "step_ms": round(1000 * statistics.median(times[name]), 1)}
        row |= {"x_best_peer": round(ratio, 4), "from": round(low, 4), "to": round(high, 4)}
        rows.append(row)
    about = {"processor": processor(), "torch": torch.__version__, "commit": commit(), "model": arguments.model}
    about |= {"bits_per_second": f"{arguments.rate:g}", "bucket_cap_mb": f"{arguments.bucket_cap_mb:g}"}
    print(", ".join(about.values()), f"best peer {best}", sep=", ")
    print(tabulate(rows, headers="keys"))
    if arguments.output:
        write_csv(arguments.output, [*rows[0], *about], [{**row, **about} for row in rows])


if __name__ == "__main__":
    main()
