"""One of two ranks that average asynchronously; run as a script, since how the interpreter ends matters.

    python ends_while_averaging.py FOLDER SCENARIO RANK

Rank 1 ends, or leaves the averages, in the way of the scenario. Rank 0 prints the error that it gets.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_compile import ddp_compile
from ddp_compile.algorithms import AsyncModelAverage
from ddp_compile.errors import ReductionError

FOLDER, SCENARIO, RANK = sys.argv[1], sys.argv[2], int(sys.argv[3])
LIMIT_S = 15.0  # for events that take some seconds


def make_model() -> tuple[Any, torch.optim.Optimizer]:
    store = f"file://{FOLDER}/{SCENARIO}"
    dist.init_process_group("gloo", init_method=store, rank=RANK, world_size=2, timeout=timedelta(seconds=60))
    # The interval is so long that there is only one round.
    algorithm = AsyncModelAverage(sync_interval_ms=1e6)
    model = ddp_compile(torch.nn.Linear(4, 4), algorithm=algorithm, backend="eager")
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(model: Any, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)


def train_until_told() -> None:
    model, optimizer = make_model()
    begin = time.monotonic()
    try:
        while time.monotonic() < begin + LIMIT_S:
            train(model, optimizer, 1)
    except ReductionError as error:
        print(error)


def end() -> None:
    """What rank 1 does after some steps."""
    model, optimizer = make_model()
    if SCENARIO == "leave":
        try:
            with model.comm_algorithm:
                train(model, optimizer, 5)
                raise KeyError("on purpose")
        except KeyError:
            signal.pause()  # the process continues
    train(model, optimizer, 5)
    if SCENARIO == "exit":
        sys.exit(1)
    if SCENARIO == "blocked":
        atexit.register(signal.pause)
    if SCENARIO == "let_go":
        del model, optimizer
        gc.collect()
        signal.pause()
    if SCENARIO != "end":
        raise KeyError("on purpose")


torch.set_num_threads(1)
torch.compiler.set_stance("force_eager")
if RANK == 0:
    train_until_told()
elif SCENARIO == "child":
    process = multiprocessing.get_context("fork").Process(target=end)
    process.start()
    process.join()
    sys.exit(process.exitcode)
else:
    end()
