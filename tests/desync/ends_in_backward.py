"""A rank that an error ends in its backward; as a script, with the port of a TCPStore, in the interpreter itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from ddp_compile.runtime.desync.group_store import GroupStore
from ddp_compile.runtime.desync.monitor import post_uncaught_error
from ddp_compile.runtime.desync.rank_status import RankStatuses


def train_until_it_raises(_rank: int, port: int) -> None:
    shared = dist.TCPStore("127.0.0.1", port, is_master=False)
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0, get_group_store=lambda: shared)
    statuses = RankStatuses(GroupStore(group, "test/"), 0, range(2))
    post_uncaught_error(statuses)
    statuses.note("backward of iteration", 3)
    raise ValueError("a hook refused the gradient")


if __name__ == "__main__":
    train_until_it_raises(0, int(sys.argv[1]))
