"""Run as a script with the port of a TCPStore: a rank that an error ends in the middle of a backward."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from ddp_compile.runtime.group_store import GroupStore
from ddp_compile.runtime.progress import post_uncaught_error
from ddp_compile.runtime.standing import Standings

shared = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0, get_group_store=lambda: shared)
standings = Standings(GroupStore(group, "test/"), 0, 2)
post_uncaught_error(standings)
standings.note("backward of round", 3)
raise ValueError("a hook refused the gradient")
