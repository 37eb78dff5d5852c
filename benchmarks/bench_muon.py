"""The optimizer's step with Muon and AdamW: on every rank, beside sharded over two ranks and over four.

    python benchmarks/bench_muon.py [--model gpt-medium] [--optimizer muon-float32] [--ranks 2,4] [--rounds 20]
        [--cpu-time] [--output FILE.csv]

A rank's step waits for no other rank. So in each round the ranks step one after the other, each alone on one core while
the others sleep in a barrier, and a machine with two cores can time four ranks. The gathers that steps start are gloo's
threads, which have a core of their own if there are two. The replicated step takes its turn in the same round, in rank
0's process, on the same core. Forwards and backwards, all ranks at once and eager, are not timed.

step_ms: of the replicated step, or of the slowest rank's in each round. ratio: the median over the rounds of sharded to
replicated, with its 95 % interval. cost_max_mean, muon_max_mean: what the rank with most to do has, in units of the
mean, by the cost from which owners are chosen, and by the median time of its step of Muon. states_mib: what the
allocator has given out during the first steps of both optimizers, which make their states, and has not got back; on the
rank with most.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.optim import Optimizer

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.bench.profiling import allocated_bytes
from ddp_compile.bench.report import report_rows
from ddp_compile.bench.results import median_and_interval
from ddp_compile.bench.settings import WorkloadSettings
from ddp_compile.bench.training import WITH_MUON, Float32NewtonSchulz, make_optimizers
from ddp_compile.bench.workloads import make_workload
from ddp_compile.runtime.sharded.owners import cost_of

NUM_WARM = 3


class OnRank(NamedTuple):
    """What a rank has measured; seconds of each round, for each of the optimizers."""

    replicated: list[list[float]]  #: empty but on rank 0
    sharded: list[list[float]]
    cost: float  #: of the matrices that it owns
    states_bytes: int
    replicated_bytes: int


def timed(optimizers: Sequence[Optimizer], arguments: argparse.Namespace) -> list[float]:
    """Seconds of each optimizer's step."""
    now = time.thread_time if arguments.cpu_time else time.perf_counter
    ends = [now()]
    with Float32NewtonSchulz() if arguments.optimizer == "muon-float32" else nullcontext():
        for optimizer in optimizers:
            optimizer.step()
            ends.append(now())
    return [end - begin for begin, end in pairwise(ends)]


def first_step_bytes(optimizers: Sequence[Optimizer], arguments: argparse.Namespace) -> int:
    """Bytes that stay allocated after the first steps: the states."""
    return allocated_bytes(lambda: timed(optimizers, arguments))


class Replicated:
    """A model whose gradients stay, and its optimizers."""

    def __init__(self, settings: WorkloadSettings) -> None:
        workload = make_workload(settings)
        inputs, targets = workload.make_batch(torch.Generator().manual_seed(0))
        workload.loss(workload.model(inputs), targets).backward()
        self.optimizers = make_optimizers(settings.optimizer, workload.model)


class Sharded:
    """A sharded model; ``backward`` gives it gradients, with all ranks."""

    def __init__(self, settings: WorkloadSettings) -> None:
        self.workload = make_workload(settings)
        self.model: Any = ddp_compile(self.workload.model, backend="eager")
        self.optimizers = make_optimizers(settings.optimizer, self.model)
        *_, muon = self.optimizers
        costs = {id(p): cost_of(muon, group, p) for group in muon.param_groups for p in group["params"]}
        self.costs = {name: costs.get(id(parameter), 0.0) for name, parameter in self.model.named_parameters()}
        shard_optimizer(self.optimizers, self.model)
        self.batch = self.workload.make_batch(torch.Generator().manual_seed(dist.get_rank()))

    def backward(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        inputs, targets = self.batch
        self.workload.loss(self.model(inputs), targets).backward()

    def own_cost(self) -> float:
        gradients = [gradient for bucket in self.model.bucket_plan.buckets for gradient in bucket.gradients]
        return sum(self.costs[gradient.fqn] for gradient in gradients if gradient.owner == dist.get_rank())


@torch.compiler.set_stance("force_eager")
def measure_rank(rank: int, world_size: int, store: str, arguments: argparse.Namespace) -> None:
    """One rank: every step in turns with the other ranks'; rank 0 writes what all have measured."""
    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {cores[-1]})  # of this thread, and of gloo's, which it starts
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    settings = WorkloadSettings(model=arguments.model, batch_size=1, optimizer=arguments.optimizer)
    sharded, replicated = Sharded(settings), Replicated(settings) if rank == 0 else None
    sharded.backward()  # which makes threads for gathers, on the core of the others
    os.sched_setaffinity(0, {cores[0]})
    replicated_bytes = 0 if replicated is None else first_step_bytes(replicated.optimizers, arguments)
    sharded_bytes = first_step_bytes(sharded.optimizers, arguments)
    of_replicated, of_sharded = [], []
    for number in range(NUM_WARM + arguments.rounds):
        sharded.backward()
        places = range(world_size + 1)  # the last one is the replicated step's
        for place in (*places[number % len(places) :], *places[: number % len(places)]):
            dist.barrier()
            if place == rank:
                of_sharded.append(timed(sharded.optimizers, arguments))
            elif place == world_size and replicated is not None:
                of_replicated.append(timed(replicated.optimizers, arguments))
        dist.barrier()
    timings = of_replicated[NUM_WARM:], of_sharded[NUM_WARM:]
    measured = OnRank(*timings, sharded.own_cost(), sharded_bytes, replicated_bytes)
    of_all: list[Any] = [None] * world_size
    dist.all_gather_object(of_all, measured)
    if rank == 0:
        torch.save([each._asdict() for each in of_all], f"{store}.results")
    dist.barrier()
    dist.destroy_process_group()


def measure(world_size: int, arguments: argparse.Namespace) -> list[OnRank]:
    """What each rank has measured."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        mp.spawn(measure_rank, args=(world_size, store, arguments), nprocs=world_size)
        return [OnRank(**each) for each in torch.load(f"{store}.results")]


def max_of_mean(values: Sequence[float]) -> float:
    return round(max(values) / statistics.mean(values), 3)


def rows_of(world_size: int, ranks: Sequence[OnRank]) -> list[dict[str, object]]:
    """A row for the replicated step, and one for the sharded step."""
    replicated = [sum(step) for step in ranks[0].replicated]
    slowest = [max(sum(step) for step in steps) for steps in zip(*(rank.sharded for rank in ranks), strict=True)]
    ratio, low, high = median_and_interval(a / b for a, b in zip(slowest, replicated, strict=True))
    muon = [statistics.median(last for *_, last in rank.sharded) for rank in ranks]
    rows: list[dict[str, object]] = []
    for name, steps, num_bytes in (
        ("replicated", replicated, ranks[0].replicated_bytes),
        ("sharded", slowest, max(rank.states_bytes for rank in ranks)),
    ):
        p20, p50, p80 = (1000 * statistics.quantiles(steps, n=10, method="inclusive")[i] for i in (1, 4, 7))
        row: dict[str, object] = {"ranks": world_size, "step": name, "p20_ms": round(p20, 2), "step_ms": round(p50, 2)}
        rows.append(row | {"p80_ms": round(p80, 2), "states_mib": round(num_bytes / 2**20, 2)})
    rows[0] |= dict.fromkeys(("ratio", "from", "to", "cost_max_mean", "muon_max_mean"))
    rows[1] |= {"ratio": round(ratio, 4), "from": round(low, 4), "to": round(high, 4)}
    rows[1] |= {"cost_max_mean": max_of_mean([rank.cost for rank in ranks]), "muon_max_mean": max_of_mean(muon)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-medium")
    parser.add_argument("--optimizer", choices=WITH_MUON, default="muon-float32")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU time of the thread that steps, for a machine that others use too"
    )
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    rows = []
    for world_size in map(int, arguments.ranks.split(",")):
        rows += rows_of(world_size, measure(world_size, arguments))
    clock = "CPU time" if arguments.cpu_time else "wall time"
    report_rows(rows, arguments.output, model=arguments.model, optimizer=arguments.optimizer, clock=clock)


if __name__ == "__main__":
    main()
