"""Pairs of ranks that average asynchronously, one of which ends while the other continues to train; run as a script.

It imports torch once and forks at its top level, so that each rank ends like a script started by torchrun: by leaving
the first frame of the interpreter's main thread. It prints a line for each rank that reports something, and one for
each pair with the exit codes.

    python ends_while_averaging.py FOLDER SCENARIO ...
"""

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo
import torch._inductor.compile_fx  # otherwise ddp_compile imports it, once in each rank
import torch.distributed as dist

from ddp_compile import ddp_compile
from ddp_compile.algorithms import AsyncModelAverage
from ddp_compile.errors import ReductionError

LIMIT_S = 15.0  # for events that take some seconds


def make_model(scenario: str, rank: int) -> tuple[Any, torch.optim.Optimizer]:
    store = f"file://{sys.argv[1]}/{scenario}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
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


def report(line: str) -> None:
    """Print a line by one write, since other processes print to the same pipe."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def train_until_told(scenario: str) -> None:
    model, optimizer = make_model(scenario, 0)
    begin = time.monotonic()
    try:
        while time.monotonic() < begin + LIMIT_S:
            train(model, optimizer, 1)
        said = "nothing"
    except ReductionError as error:
        said = str(error)
    report(f"{scenario} said: {said!r}")


def end(scenario: str) -> None:
    """What rank 1 does after some steps."""
    model, optimizer = make_model(scenario, 1)
    if scenario == "leave":
        try:
            with model.comm_algorithm:
                train(model, optimizer, 5)
                raise KeyError("on purpose")
        except KeyError:
            signal.pause()  # the process continues
    train(model, optimizer, 5)
    if scenario == "exit":
        sys.exit(1)
    if scenario == "blocked":
        atexit.register(signal.pause)
    if scenario == "let_go":
        del model, optimizer
        gc.collect()
        signal.pause()
    if scenario != "end":
        raise KeyError("on purpose")


def wait_for(pair: list[int]) -> list[int]:
    """The exit codes; rank 1 has some seconds more than rank 0, and is killed then."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(pair[0], 0)[1])]
    deadline = time.monotonic() + 3.0
    while (found := os.waitpid(pair[1], os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if found == (0, 0):
        os.kill(pair[1], signal.SIGTERM)
        found = os.waitpid(pair[1], 0)
    return [*codes, os.waitstatus_to_exitcode(found[1])]


def fork_pairs(scenarios: list[str]) -> tuple[str, int] | dict[str, list[int]]:
    """In a copy its scenario and rank; in the process that started them their process numbers."""
    pairs: dict[str, list[int]] = {}
    for scenario in scenarios:
        for rank in range(2):
            child = os.fork()
            if child == 0:
                return scenario, rank
            pairs.setdefault(scenario, []).append(child)
    return pairs


torch.set_num_threads(1)
torch.compiler.set_stance("force_eager")
begun = fork_pairs(sys.argv[2:])
if isinstance(begun, dict):
    for name, pair in begun.items():
        report(f"{name} codes: {wait_for(pair)}")
elif begun[1] == 0:
    train_until_told(begun[0])
elif begun[0] == "child":
    process = multiprocessing.get_context("fork").Process(target=end, args=[begun[0]])
    process.start()
    process.join()
    sys.exit(process.exitcode)
else:
    end(begun[0])
