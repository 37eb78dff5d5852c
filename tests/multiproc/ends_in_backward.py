"""Run as a script with the path of a FileStore: a rank that an error ends in the middle of a backward."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from ddp_compile.runtime.group_store import GroupStore
from ddp_compile.runtime.progress import post_uncaught_error
from ddp_compile.runtime.standing import Standings

group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0, get_group_store=lambda: dist.FileStore(sys.argv[1], 2))
standings = Standings(GroupStore(group, "test/"), 0, 2)
post_uncaught_error(standings)
standings.note("backward of round", 3)
raise ValueError("a hook refused the gradient")
