"""What it costs that the ranks tell each other where they are (docs/divergence.md): microseconds of each step.

    python benchmarks/bench_progress.py [--step-ms 10] [--steps 1280] [--buckets 10] [--output FILE.csv]

Two ranks on gloo with a TCPStore train a small model whose steps take ``--step-ms``, most of it asleep, so that caches
are as cold as after a real step. All calls of `Progress` are timed on both ranks, less what timing takes, and the
dearer rank counts. Of steps without an agreement point: what the calling thread takes of a processor, median and mean,
as the clock's time has the threads of gloo in it, which reduce buckets meanwhile. Of steps with one, in which the rank
waits for the store: the clock's median. ``share_percent`` is what both come to, with one agreement point in 64 rounds.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate
from torch import nn

from ddp_compile import ddp_compile
from ddp_compile.bench.provenance import commit, processor
from ddp_compile.runtime.agreement_points import ROUNDS_BETWEEN_AGREEMENTS, is_agreement_point

WORLD_SIZE = 2
WIDTH = 64
WARM_UP = 64  # to where agreement points are ROUNDS_BETWEEN_AGREEMENTS rounds apart
CALLS = (
    "forward_begins",
    "forward_ends",
    "backward_begins",
    "bucket_leaves",
    "bucket_is_awaited",
    "compare",
    "round_ends",
)


class Stopwatch:
    """Adds up the seconds spent in methods of one object: by the calling thread on a processor, and on the clock."""

    def __init__(self) -> None:
        self.processor_s = self.clock_s = 0.0
        self.num_calls = 0

    def watch(self, owner: Any, name: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            clock, processor = time.perf_counter(), time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.processor_s += time.thread_time() - processor
                self.clock_s += time.perf_counter() - clock

        setattr(owner, name, timed)

    def nothing(self) -> None:
        """What is timed to know what timing takes."""


def measure_rank(rank: int, store: str, arguments: argparse.Namespace, results: str) -> None:
    """One rank: rank 0 writes the seconds of each step on the dearer rank."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    port_file = Path(store)
    if rank == 0:
        tcp_store = dist.TCPStore("127.0.0.1", 0, WORLD_SIZE, is_master=True, wait_for_workers=False)
        port_file.with_suffix(".new").write_text(str(tcp_store.port))
        port_file.with_suffix(".new").rename(port_file)
    else:
        while not port_file.exists():
            time.sleep(0.01)
        tcp_store = dist.TCPStore("127.0.0.1", int(port_file.read_text()), WORLD_SIZE, is_master=False)
    dist.init_process_group("gloo", store=tcp_store, rank=rank, world_size=WORLD_SIZE)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(arguments.buckets)]
    model = ddp_compile(nn.Sequential(*layers), backend="eager", bucket_cap_mb=1e-4)
    stopwatch, overhead = Stopwatch(), Stopwatch()
    progress = model._ddp_compile_state.progress
    for name in CALLS:
        stopwatch.watch(progress, name)
    overhead.watch(overhead, "nothing")
    times = []
    for i in range(WARM_UP + arguments.steps):
        start = time.perf_counter()
        for each in (stopwatch, overhead):
            each.processor_s, each.clock_s, each.num_calls = 0.0, 0.0, 0
        model(torch.ones(4, WIDTH)).sum().backward()
        model.zero_grad()
        for _ in range(stopwatch.num_calls):
            overhead.nothing()
        time.sleep(max(0.0, arguments.step_ms / 1000 - (time.perf_counter() - start)))
        if i >= WARM_UP:
            waits = is_agreement_point(i + 1)
            times.append(
                stopwatch.clock_s - overhead.clock_s if waits else stopwatch.processor_s - overhead.processor_s
            )
    dearer = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(dearer, dist.ReduceOp.MAX)
    assert len(model.bucket_plan.buckets) == arguments.buckets
    if rank == 0:
        torch.save(dearer, results)
    dist.barrier()  # rank 0 holds the store
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=1280)
    parser.add_argument("--buckets", type=int, default=10)
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = str(Path(folder) / "seconds")
        mp.spawn(measure_rank, args=(str(Path(folder) / "port"), arguments, results), nprocs=WORLD_SIZE)
        seconds: list[float] = torch.load(results).tolist()
    rounds = range(WARM_UP + 1, WARM_UP + arguments.steps + 1)
    without = [s for s, n in zip(seconds, rounds, strict=True) if not is_agreement_point(n)]
    agreeing_s = statistics.median(s for s, n in zip(seconds, rounds, strict=True) if is_agreement_point(n))
    mean_s = statistics.fmean(without) + agreeing_s / ROUNDS_BETWEEN_AGREEMENTS
    row = {
        "step_ms": arguments.step_ms,
        "steps": arguments.steps,
        "buckets": arguments.buckets,
        "p50_us": round(1e6 * statistics.median(without), 1),
        "mean_us": round(1e6 * statistics.fmean(without), 1),
        "agreeing_us": round(1e6 * agreeing_s, 1),
        "share_percent": round(100 * mean_s / (arguments.step_ms / 1000), 3),
    }
    about = {"processor": processor(), "torch": torch.__version__, "commit": commit()}
    print(", ".join(about.values()))
    print(tabulate([row], headers="keys"))
    if arguments.output:
        with arguments.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*row, *about])
            writer.writeheader()
            writer.writerow({**row, **about})


if __name__ == "__main__":
    main()
