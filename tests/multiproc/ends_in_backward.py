"""Run as a script, with a way to start and the port of a TCPStore: a rank that an error ends in its backward."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from ddp_compile.runtime.desync.group_store import GroupStore
from ddp_compile.runtime.desync.monitor import post_uncaught_error
from ddp_compile.runtime.desync.rank_status import RankStatuses


def train(_rank: int, port: int) -> None:
    shared = dist.TCPStore("127.0.0.1", port, is_master=False)
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0, get_group_store=lambda: shared)
    statuses = RankStatuses(GroupStore(group, "test/"), 0, 2)
    post_uncaught_error(statuses)
    statuses.note("backward of iteration", 3)
    raise ValueError("a hook refused the gradient")


if __name__ == "__main__":
    way, port = sys.argv[1], int(sys.argv[2])
    if way == "interpreter":
        train(0, port)
    elif way == "spawn":
        mp.spawn(train, (port,))
    else:
        process = mp.get_context(way).Process(target=train, args=(0, port))
        process.start()
        process.join()
