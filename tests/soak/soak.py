"""Trains for many steps, and makes and drops many models, while memory, threads, descriptors and times must stay flat.

    python tests/soak/soak.py [--steps 20000] [--models 100] [--ways default sharded asynchronous]

Two ranks train a small compiled model on the CPU. A way to train is one run of ``--steps`` steps. Its figures are those
of rank 0 after each quarter: resident memory, threads, file descriptors, process groups, and the median step of the
quarter. Then each rank makes ``--models`` models one after the other, trains, unwraps and drops them. Ends
with 1 if something grows: see `LIMITS`.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate
from torch import nn

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.algorithms import AsyncModelAverage

WORLD_SIZE = 2
WIDTH = 32
ROWS = 8
#: Parts of a run that are compared. The first one compiles and warms up, so growth counts from its end.
NUM_QUARTERS = 4
#: What may come from the end of the first quarter to the end of the last one. The allocator keeps pages that it has
#: split, a timer or a finalizer may be about to run, and times differ by what else the machine does.
LIMITS = {"memory MiB": 8.0, "threads": 2.0, "descriptors": 2.0, "groups": 0.0}
#: What torch.compile alone keeps of a model that is gone, since Dynamo never drops finalizers on modules and functions
#: that its guards mention: 0.2 MiB of this one (torch 2.13). Ours compiles two functions.
MIB_OF_A_MODEL = 0.5
#: By how much the median step of the last quarter may exceed the one of the second.
MOST_SLOWDOWN = 1.3


class Figures(NamedTuple):
    """What a rank holds, and how fast it is."""

    memory_mib: float
    threads: int
    descriptors: int
    groups: int
    step_ms: float


class Way(NamedTuple):
    make: Callable[[], tuple[Any, torch.optim.Optimizer]]
    end: Callable[[Any], None] = lambda model: None


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def make(**settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    settings = {"bucket_cap_mb": 0.005, "first_bucket_cap_mb": 0.005, "backend": "aot_eager", **settings}
    model = ddp_compile(make_module(), **settings)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def make_sharded() -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = make()
    shard_optimizer(optimizer, model)
    return model, optimizer


WAYS = {
    "default": Way(make),
    "sharded": Way(make_sharded),
    "asynchronous": Way(
        lambda: make(algorithm=AsyncModelAverage(sync_interval_ms=5, warmup_steps=10)),
        lambda model: model.comm_algorithm.abort(),
    ),
}


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    optimizer.step()


def figures(step_s: float = 0.0) -> Figures:
    gc.collect()
    process = psutil.Process()
    return Figures(
        memory_mib=process.memory_info().rss / 2**20,
        threads=process.num_threads(),
        descriptors=process.num_fds(),
        groups=len(dist.distributed_c10d._world.pg_map),
        step_ms=step_s * 1e3,
    )


def train(way: Way, num_steps: int) -> list[Figures]:
    """The figures after each quarter."""
    model, optimizer = way.make()
    found = []
    for _ in range(NUM_QUARTERS):
        times = []
        for _ in range(max(1, num_steps // NUM_QUARTERS)):
            began = time.perf_counter()
            step(model, optimizer)
            times.append(time.perf_counter() - began)
        found.append(figures(median(times)))
    way.end(model)
    return found


def make_and_drop(num_models: int) -> list[Figures]:
    """The figures after each quarter of the models, which are compiled, sharded and replicated in turn."""
    found = []
    for _ in range(NUM_QUARTERS):
        times = []
        for number in range(max(1, num_models // NUM_QUARTERS)):
            began = time.perf_counter()
            group = dist.new_group()
            model, optimizer = make(process_group=group)
            if number % 2:
                shard_optimizer(optimizer, model)
            for _ in range(3):
                step(model, optimizer)
            model.unwrap()  # gives back the process groups of a sharded optimizer
            del model, optimizer
            gc.collect()
            dist.barrier()  # the other rank may still be sending
            dist.destroy_process_group(group)
            times.append(time.perf_counter() - began)
        torch._dynamo.reset()
        found.append(figures(median(times)))
    return found


def run_rank(rank: int, folder: str, name: str, amount: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    found = make_and_drop(amount) if name == "models" else train(WAYS[name], amount)
    if rank == 0:
        torch.save([tuple(each) for each in found], f"{folder}/figures")
    dist.barrier()
    dist.destroy_process_group()


def what_grows(found: list[Figures], num_models: int) -> list[str]:
    """What exceeds its limit, in words; ``num_models`` is 0 if one model was trained."""
    first, last = found[0], found[-1]
    limits = LIMITS | {"memory MiB": LIMITS["memory MiB"] + MIB_OF_A_MODEL * num_models}
    growth = dict(zip(limits, (b - a for a, b in zip(first[:4], last[:4], strict=True)), strict=True))
    beyond = [(name, limit) for name, limit in limits.items() if growth[name] > limit]
    wrong = [f"{name} by {growth[name]:.1f}, allowed {limit:g}" for name, limit in beyond]
    if not num_models and last.step_ms > MOST_SLOWDOWN * found[1].step_ms:
        wrong.append(f"the step from {found[1].step_ms:.2f} to {last.step_ms:.2f} ms, allowed {MOST_SLOWDOWN} times")
    return wrong


def soak(name: str, amount: int) -> tuple[list[Figures], list[str]]:
    """The figures of one way to train, or of making models, and what grows."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (folder, name, amount), nprocs=WORLD_SIZE)
        found = [Figures(*each) for each in torch.load(Path(folder) / "figures")]
    return found, what_grows(found, amount if name == "models" else 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=[*WAYS], help="none to make models only")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    status = 0
    for name, amount in [*((name, arguments.steps) for name in arguments.ways), ("models", arguments.models)]:
        found, wrong = soak(name, amount)
        print(f"{name}, {amount} {'models' if name == 'models' else 'steps'}")
        rows = [(f"{number} of {NUM_QUARTERS}", *each) for number, each in enumerate(found, start=1)]
        print(tabulate(rows, headers=["quarter", *LIMITS, "median ms"], floatfmt=".2f"))
        for text in wrong:
            print(f"GROWS: {text}")
            status = 1
        print(flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
