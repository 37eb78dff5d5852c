"""Stores that ranks tell each other through: what is left in them, and what is said when one is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ends_in_backward import train_until_it_raises
from models import Mlp, loss_of
from process_copies import context_of_copies, run_in_copy
from rank_pool import RankPool, on_ranks

from ddp_compile import ddp_compile

Ranks = Callable[[int], RankPool]


def in_group_with_tcp_store() -> None:
    rank, world_size, timeout = dist.get_rank(), dist.get_world_size(), timedelta(seconds=15)
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False, timeout=timeout)
        port.fill_(store.port)
    dist.broadcast(port, 0)
    if rank != 0:
        store = dist.TCPStore("127.0.0.1", int(port), world_size, is_master=False, timeout=timeout)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_agreement_points_leave_one_counter_behind() -> None:
    in_group_with_tcp_store()
    model = ddp_compile(Mlp(width=8, num_layers=2), bucket_cap_mb=4e-4, backend="eager")
    for _ in range(20):
        loss_of(model(torch.randn(4, 8))).backward()
    monitor = model._ddp_compile_state.monitor
    dist.barrier()
    counters = monitor._store._store._underlying_non_prefix_store.list_keys()
    dist.barrier()
    iteration_number, counters = monitor._points.iteration_number, [key for key in counters if "/agreement/" in key]
    assert iteration_number == 21
    assert len(counters) == 1


@torch.compiler.set_stance("force_eager")
def rank_0_exits() -> None:
    in_group_with_tcp_store()
    model = ddp_compile(Mlp(width=8, num_layers=2), bucket_cap_mb=4e-4, backend="eager")
    loss_of(model(torch.randn(4, 8))).backward()
    if dist.get_rank() == 0:
        os._exit(0)
    loss_of(model(torch.randn(4, 8))).backward()


def test_a_store_that_went_with_rank_0_is_said_to_be_gone(ranks: Ranks) -> None:
    started = time.monotonic()
    exited, waiting = ranks(2).run_expecting_failures(rank_0_exits)
    assert exited.kind == "EOFError"
    assert waiting.kind == "ReductionError"
    assert "bucket 0" in waiting.message and "the store that they tell it to is gone" in waiting.message
    assert time.monotonic() - started < 30


def end_in_backward(start: Callable[[int], None]) -> None:
    """A rank whose backward raises tells the others what it raised, however its process was started."""
    timeout = timedelta(seconds=15)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    start(store.port)
    rank_status = store.get("test/rank_status/0").decode()
    assert rank_status.endswith("backward of iteration 3: raised ValueError: a hook refused the gradient")


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_what_ends_a_process_of_torchs_in_its_backward_is_told_to_the_others(method: str) -> None:
    def start(port: int) -> None:
        with pytest.raises(mp.ProcessRaisedException, match="a hook refused the gradient"):
            mp.start_processes(train_until_it_raises, (port,), start_method=method)

    context_of_copies()
    end_in_backward(start)


def test_what_ends_a_process_of_pythons_in_its_backward_is_told_to_the_others() -> None:
    def start(port: int) -> None:
        ended = run_in_copy(train_until_it_raises, 0, port)
        assert ended.exit_code == 1 and "a hook refused the gradient" in ended.stderr

    end_in_backward(start)


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name)), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.long
def test_what_ends_an_interpreter_in_its_backward_is_told_to_the_others() -> None:
    def start(port: int) -> None:
        assert "a hook refused the gradient" in run_script("ends_in_backward.py", str(port)).stderr

    end_in_backward(start)


@pytest.mark.long
def test_a_process_whose_store_froze_ends_with_its_own_exit_code() -> None:
    ended = run_script("frozen_store.py")
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout.startswith("no answer within")
