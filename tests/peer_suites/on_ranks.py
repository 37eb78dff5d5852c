"""Runs one test on ranks that are copies of this process, with a limit to its time."""

import multiprocessing
import os
import tempfile
import time
import traceback
import unittest
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peer_suites import stand_ins
from peer_suites.torch_suites import STAND_IN, PeerTest
from torch.testing._internal.common_utils import set_rng_seed

GROUP_TIMEOUT_S = 60.0
#: How long the other ranks may run after one has failed, since they may wait for it in vain.
TIME_TO_FAIL_S = 3.0

PASSED, SKIPPED, FAILED, TIMED_OUT = "passed", "skipped", "failed", "timed out"


class RankEnd(NamedTuple):
    """How a test has ended on one rank; ``error`` is the exception, or why it was skipped."""

    outcome: str
    error: str
    traceback: str
    made_one: bool


class TestEnd(NamedTuple):
    """The outcome of a test: that of the first rank that did not pass."""

    outcome: str
    error: str
    details: str
    made_one: bool
    seconds: float


def run_on_ranks(test: PeerTest, stand_in: type, limit_s: float) -> TestEnd:
    """Run a test with ``stand_in`` instead of DistributedDataParallel."""
    context = multiprocessing.get_context("fork")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="peer_") as name:
        folder = Path(name)
        for subfolder in ("barrier", "test_dir"):  # the folders through which ranks of torch's tests meet
            (folder / subfolder).mkdir()
        processes, connections = [], []
        for rank in range(test.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(test, rank, stand_in, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        ends = _collect(connections, limit_s)
        for process in processes:
            process.kill()
            process.join()
        seconds = time.monotonic() - begin
        logs = "".join(f"--- output of rank {r} ---\n{_tail(folder, r)}" for r in range(test.world_size))
    return _join_ends(ends, logs, seconds)


def _tail(folder: Path, rank: int) -> str:
    file = folder / f"rank_{rank}.log"
    return file.read_text(errors="replace")[-8000:] if file.exists() else ""


def _collect(connections: Sequence[Connection], limit_s: float) -> list[RankEnd | None]:
    """Each rank's end in the order in which they ended; None for a rank that was not waited for any longer."""
    ends: list[RankEnd | None] = []
    open_ones = list(connections)
    deadline = time.monotonic() + limit_s
    while open_ones and (ready := wait(open_ones, max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            open_ones.remove(connection)
            try:
                end = connection.recv()
            except EOFError:
                end = RankEnd(FAILED, "the process of a rank ended", "", False)
            ends.append(end)
            if end.outcome == FAILED:
                deadline = min(deadline, time.monotonic() + TIME_TO_FAIL_S)
    return ends + [None] * len(open_ones)


def _join_ends(ends: Sequence[RankEnd | None], logs: str, seconds: float) -> TestEnd:
    ended = [end for end in ends if end is not None]
    made_one = any(end.made_one for end in ended)
    for outcome in (FAILED, SKIPPED):
        for end in ended:
            if end.outcome == outcome:
                return TestEnd(outcome, end.error, end.traceback + logs, made_one, seconds)
    if len(ended) < len(ends):
        return TestEnd(TIMED_OUT, f"no end after {seconds:.0f} s", logs, made_one, seconds)
    return TestEnd(PASSED, "", "", made_one, seconds)


def _serve(test: PeerTest, rank: int, stand_in: type, folder: Path, connection: Any) -> None:
    log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    os.environ.update(WORLD_SIZE=str(test.world_size), TEMP_DIR=str(folder), RANK=str(rank))
    torch.set_num_threads(1)
    setattr(test.module, STAND_IN, stand_in)
    try:
        _call(test, rank, folder)
        end = RankEnd(PASSED, "", "", stand_ins.made_one)
    except unittest.SkipTest as skip:
        end = RankEnd(SKIPPED, str(skip), "", stand_ins.made_one)
    except SystemExit as leave:
        end = RankEnd(SKIPPED, f"exit code {leave.code}", "", stand_ins.made_one)
    except BaseException as error:
        end = RankEnd(FAILED, f"{type(error).__name__}: {error}", traceback.format_exc(), stand_ins.made_one)
    connection.send(end)
    time.sleep(3600)  # a rank that left would be missed by the others; the parent ends all of them together


def _call(test: PeerTest, rank: int, folder: Path) -> None:
    if test.in_group:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "group"), test.world_size),
            rank=rank,
            world_size=test.world_size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )
        dist.barrier()
    case = test.make_case(test.name)
    case.rank, case.file_name = rank, str(folder / "store")
    set_rng_seed()
    getattr(case, test.name)()
