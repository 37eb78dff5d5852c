"""Ranks for the scripts of this folder: a process and a core each, in a default group on gloo."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(world_size: int, measure: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``measure(*arguments)`` returns on each rank. Other processes must be able to import it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run_rank, args=(world_size, store.port, folder, measure, arguments), nprocs=world_size)
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(world_size)]


def _run_rank(
    rank: int, world_size: int, port: int, folder: str, measure: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.save(measure(*arguments), Path(folder, str(rank)))
    dist.barrier()
    dist.destroy_process_group()
