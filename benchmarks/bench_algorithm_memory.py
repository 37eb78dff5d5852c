"""Memory that each algorithm takes in addition to a gradient all-reduce, by the allocator's events.

    python benchmarks/bench_algorithm_memory.py [--layers 16] [--width 512] [--ranks 2] [--output FILE.csv]

Each algorithm trains in its own processes. "between_steps": bytes that are live after a step and ``zero_grad``; "peak":
the most bytes that are live at the same time in a step; "states": the optimizer's states on this rank, which are in
both. "_x": as a multiple of the parameters' bytes, and for the first two the difference to an all-reduce ("beside").
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.algorithms import (
    AlgorithmConfig,
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
)
from ddp_compile.bench.profiling import live_bytes, peak_live_bytes
from ddp_compile.bench.provenance import commit, processor
from ddp_compile.bench.report import write_csv
from ddp_compile.optim import QAdam

ROWS = 4
NUM_WARM = 4  # QAdam's warm-up is over by then


class Measured(NamedTuple):
    """Bytes on rank 0."""

    between_steps: int
    peak: int
    states: int


Parts = tuple[nn.Module, torch.optim.Optimizer]


def with_sgd(algorithm: AlgorithmConfig) -> Callable[[nn.Module, float], Parts]:
    def make(module: nn.Module, cap_mib: float) -> Parts:
        model = ddp_compile(module, backend="aot_eager", bucket_cap_mb=cap_mib, algorithm=algorithm)
        return model, torch.optim.SGD(module.parameters(), lr=1e-3)

    return make


def with_adam(sharded: bool) -> Callable[[nn.Module, float], Parts]:
    def make(module: nn.Module, cap_mib: float) -> Parts:
        model = ddp_compile(module, backend="aot_eager", bucket_cap_mb=cap_mib)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
        return model, shard_optimizer(optimizer, model) if sharded else optimizer

    return make


def with_qadam(module: nn.Module, cap_mib: float) -> Parts:
    optimizer = QAdam(module.parameters(), lr=1e-3, warmup_steps=NUM_WARM // 2)
    return ddp_compile(module, backend="aot_eager", bucket_cap_mb=cap_mib, algorithm=optimizer.algorithm()), optimizer


SGD, ADAM = "all-reduce, SGD", "all-reduce, Adam"
#: The baseline of each algorithm, and how each is made.
WAYS: dict[str, tuple[str, Callable[[nn.Module, float], Parts]]] = {
    SGD: (SGD, with_sgd(GradientAllReduce())),
    "bfloat16": (SGD, with_sgd(GradientAllReduce(wire_dtype=torch.bfloat16))),
    "ByteGrad": (SGD, with_sgd(ByteGrad())),
    "Decentralized, all": (SGD, with_sgd(Decentralized())),
    "Decentralized, shift_one": (SGD, with_sgd(Decentralized(peer_selection="shift_one"))),
    "LowPrecisionDecentralized": (SGD, with_sgd(LowPrecisionDecentralized())),
    "LocalSGD": (SGD, with_sgd(LocalSGD(period=1))),
    "DiLoCo": (SGD, with_sgd(DiLoCo(sync_every=1))),
    "DiLoCo, eight bits": (SGD, with_sgd(DiLoCo(sync_every=1, wire_dtype=torch.uint8))),
    "AsyncModelAverage": (SGD, with_sgd(AsyncModelAverage(sync_interval_ms=1, warmup_steps=0))),
    ADAM: (ADAM, with_adam(sharded=False)),
    "QAdam": (ADAM, with_qadam),
    "sharded optimizer, Adam": (ADAM, with_adam(sharded=True)),
}


def measure(make: Callable[[nn.Module, float], Parts], arguments: argparse.Namespace) -> Measured:
    torch.manual_seed(0)
    layers = [nn.Linear(arguments.width, arguments.width) for _ in range(arguments.layers)]
    model, optimizer = make(nn.Sequential(*layers), arguments.bucket_cap_mb)
    x = torch.randn(ROWS, arguments.width)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(NUM_WARM):
        step()
    gc.collect()
    training: Any = SimpleNamespace(step=step, optimizers=[optimizer], clock=SimpleNamespace(device=x.device))
    parameters = list(model.parameters())
    between_steps = live_bytes(parameters)
    peak = peak_live_bytes(training, parameters)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return Measured(between_steps, peak, sum(state.nbytes for state in states if state.dim()))


def rank_of_world(rank: int, name: str, store: str, arguments: argparse.Namespace, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, arguments.ranks), rank=rank, world_size=arguments.ranks)
    measured = measure(WAYS[name][1], arguments)
    if rank == 0:
        queue.put(measured)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--bucket-cap-mb", type=float, default=2.0, help="capacity of a bucket, MiB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, help="CSV file")
    arguments = parser.parse_args()
    measured: dict[str, Measured] = {}
    queue = mp.get_context("spawn").SimpleQueue()
    for name in tqdm(WAYS):
        with tempfile.TemporaryDirectory() as directory:
            store = str(Path(directory) / "store")
            mp.spawn(rank_of_world, (name, store, arguments, queue), nprocs=arguments.ranks)
        measured[name] = queue.get()
    num_bytes = 4 * arguments.layers * arguments.width * (arguments.width + 1)
    rows = []
    for name, (base, _) in WAYS.items():
        ours, theirs = measured[name], measured[base]
        rows.append(
            {
                "algorithm": name,
                "beside": base,
                "between_steps_x": round((ours.between_steps - theirs.between_steps) / num_bytes, 3),
                "peak_x": round((ours.peak - theirs.peak) / num_bytes, 3),
                "states_x": round(ours.states / num_bytes, 3),
                **ours._asdict(),
            }
        )
    size = f"{num_bytes / 2**20:.1f} MiB of parameters in buckets of {arguments.bucket_cap_mb} MiB"
    print(f"{size}, {arguments.ranks} ranks; {processor()}, torch {torch.__version__}, {commit()}")
    print(tabulate(rows, headers="keys"))
    if arguments.output is not None:
        write_csv(arguments.output, list(rows[0]), rows)


if __name__ == "__main__":
    main()
