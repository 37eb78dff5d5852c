"""Runs what ranks that differ do, in a process group of its own."""

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT_S = 5.0  # a rank's other work must fit in, with other tests running


def run_and_meet(scenario: Callable[[dist.ProcessGroup], None], compiles: bool = False) -> str:
    """What the scenario raised on this rank, in a group of short timeout; the ranks leave it together."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    started = time.monotonic()
    try:
        # What a rank does before it waits is rarely a matter of compiling, which would take more of the timeout.
        with torch.compiler.set_stance("default" if compiles else "force_eager"):
            scenario(group)
        outcome = "nothing"
    except Exception as error:
        assert time.monotonic() - started < 30
        outcome = f"{type(error).__name__}: {error}"
    dist.barrier()
    return outcome
