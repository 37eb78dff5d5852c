"""The processes that train together: one for each GPU with NCCL, or some on the CPU with gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """This process among all of them.

    Args:
        rank: Number of this process.
        size: Number of processes.
        device: The device of this process.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the ranks, element by element: a new float tensor of the same shape on every rank."""
        total = values.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    def maximum(self, values: Tensor) -> Tensor:
        """Maximum over the ranks, element by element: a new tensor of the same shape on every rank."""
        largest = values.detach().clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest

    def say(self, message: str) -> None:
        """Print on rank 0 only."""
        if self.is_main:
            print(message, flush=True)


@contextmanager
def join_world() -> Iterator[World]:
    """Join the processes that torchrun started, and leave them at the end."""
    if not dist.is_torchelastic_launched():
        raise SystemExit("start it with torchrun --standalone --nproc-per-node 2 examples/train_lm.py")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        # Ranks on one machine share its cores. With more threads than cores, each rank waits for the others' threads.
        torch.set_num_threads(max(1, _usable_cores() // int(os.environ["LOCAL_WORLD_SIZE"])))
        dist.init_process_group("gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
