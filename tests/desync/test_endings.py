"""Ranks that end, or let the model go, before the others have heard from them."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from averages import batch
from beside import flat_of, is_same_everywhere
from in_ci import only
from models import Mlp, loss_of
from process_copies import context_of_copies, run_in_copy
from rank_pool import Ranks, on_ranks
from torch.optim import Optimizer

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.algorithms import Decentralized, GradientAllReduce, LowPrecisionDecentralized
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm
from ddp_compile.runtime.comm.transfers import Transfer
from ddp_compile.runtime.desync.group_store import GroupStore
from ddp_compile.runtime.desync.monitor import post_uncaught_error
from ddp_compile.runtime.desync.rank_status import RankStatuses

#: How long after the end of rank 0 rank 1 takes its last step.
LATE_S = 2.0


def train_and_let_go(rank: int, path: Path, is_sharded: bool) -> None:
    torch.manual_seed(0)
    algorithm = GradientAllReduce() if is_sharded else LowPrecisionDecentralized()
    model: Any = ddp_compile(Mlp(17, 4), algorithm=algorithm, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if is_sharded:
        shard_optimizer(optimizer, model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model(batch(rank, step, 0))).backward()
        while step == 1 and rank == 1 and not (path / "rank 0 is done").exists():
            time.sleep(0.01)
        time.sleep(LATE_S * (step == 1 and rank == 1))
        optimizer.step()
    if rank == 1:
        assert flat_of(model).isfinite().all()


def collect() -> None:
    for _ in range(2):  # the objects that tensors refer to are only examined after the tensors are gone
        gc.collect()


def collect_in_a_fork() -> None:
    """Like a worker of a DataLoader, which has none of its parent's threads, and nothing to wait for."""
    torch._dynamo.reset()
    child = os.fork()
    if child == 0:
        collect()
        os._exit(0)
    deadline = time.monotonic() + 20
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            raise TimeoutError("the fork waits for something")
        time.sleep(0.01)


def finish_first(rank: int, path: str, is_sharded: bool) -> None:
    """A script that ends after its last step; rank 1 takes its own after rank 0 has reached its last line."""
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    train_and_let_go(rank, Path(path), is_sharded)
    if is_sharded:  # a fork waits for parameters that are being gathered, and so for the other rank
        collect()
    else:
        collect_in_a_fork()
    dist.destroy_process_group()
    Path(path, f"rank {rank} is done").touch()
    started = time.monotonic()
    collect()
    assert time.monotonic() - started < LATE_S, "the garbage collector has waited for another rank"
    remaining = [each for each in gc.get_objects() if isinstance(each, Mlp | CommAlgorithm | Optimizer)]
    print(remaining or "all are gone")


@pytest.mark.parametrize("is_sharded", only([False], [False, True]), ids=["ring", "sharded"])
def test_freed_model_lets_others_finish(is_sharded: bool, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(run_in_copy, finish_first, rank, str(tmp_path), is_sharded) for rank in range(2)]
    for run in runs:
        ended = run.result()
        assert (ended.exit_code, ended.stdout) == (0, "all are gone\n"), ended.stderr


@on_ranks(2, timeout_s=10.0)
def test_ctrl_c_while_parameters_are_awaited() -> None:
    """Rank 0 is interrupted while it waits for parameters that rank 1 steps late."""
    torch.manual_seed(0)
    model = ddp_compile(Mlp(17, 2), backend="eager")
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model(batch(dist.get_rank(), step, 0))).backward()
        if step == 2 and dist.get_rank() == 1:
            time.sleep(0.6)
        optimizer.step()
    if dist.get_rank() == 0:
        threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            flat_of(model)
    started = time.monotonic()
    values = flat_of(model)
    took_s = time.monotonic() - started
    is_equal = is_same_everywhere(values)
    assert took_s < 5 and is_equal


class Message:
    """A work that may be waited for once, as gloo's."""

    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1
        time.sleep(0.02)
        if self.num_waits > 1:
            raise RuntimeError("waited for twice")


def test_message_is_waited_for_once() -> None:
    messages = [Message() for _ in range(5)]
    transfer = Transfer(messages)  # type: ignore[arg-type]

    def wait(wait_for: Callable[[], None]) -> bool:
        wait_for()
        return all(message.num_waits == 1 for message in messages)

    waits = [transfer.wait, transfer.wait_for_others, transfer.wait]
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(wait, waits)) == [True] * 3 and transfer.is_done


def test_lost_rank_holds_up_no_message() -> None:
    class Failed(Message):
        def wait(self) -> None:
            super().wait()
            raise RuntimeError("Connection closed by peer")

    messages = [Message(), Failed(), Message()]
    Transfer(messages).wait_for_others()  # type: ignore[arg-type]
    assert [message.num_waits for message in messages] == [1, 1, 1]


# Stores through which ranks communicate: what remains in them, and the errors when one is gone.


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


@pytest.mark.parametrize(
    ("algorithm", "late"),
    [(GradientAllReduce(), 1), (Decentralized(), 0), (Decentralized(), 1)],
    ids=lambda value: value if isinstance(value, int) else type(value).__name__,
)
@on_ranks(2, eagerly=True)
def test_keys_of_agreement_points_are_deleted(algorithm: Any, late: int) -> None:
    """Decentralized compares before it meets the others: the faster rank posts its fingerprint and asks again."""
    in_group_with_tcp_store()
    model = ddp_compile(Mlp(width=8, num_layers=2), bucket_cap_mb=4e-4, backend="eager", algorithm=algorithm)
    for _ in range(20):
        time.sleep(0.03 * (dist.get_rank() == late))
        loss_of(model(torch.randn(4, 8))).backward()
    store = model._ddp_compile_state.monitor._store._store._underlying_non_prefix_store
    dist.barrier()
    compared = re.findall(r"/(?:fingerprint|replicas)/(?:agreement/)?(\d+)/", "\n".join(store.list_keys()))
    dist.barrier()
    assert set(compared) == {"16"}


@torch.compiler.set_stance("force_eager")
def rank_0_exits() -> None:
    in_group_with_tcp_store()
    model = ddp_compile(Mlp(width=8, num_layers=2), bucket_cap_mb=4e-4, backend="eager")
    loss_of(model(torch.randn(4, 8))).backward()
    if dist.get_rank() == 0:
        os._exit(0)
    loss_of(model(torch.randn(4, 8))).backward()


def test_store_is_gone_with_rank_0(ranks: Ranks) -> None:
    started = time.monotonic()
    exited, waiting = ranks(2).run_expecting_failures(rank_0_exits)
    assert exited.kind == "EOFError"
    assert waiting.kind == "ReductionError"
    assert "bucket 0" in waiting.message and "the store that they post to is gone" in waiting.message
    assert time.monotonic() - started < 30


@torch.compiler.set_stance("force_eager")
def rank_1_exits_in_join() -> None:
    model = ddp_compile(Mlp(width=8, num_layers=2), backend="eager")
    with model.join():
        for step in range(2):
            if (dist.get_rank(), step) == (1, 1):
                os._exit(0)
            loss_of(model(torch.randn(4, 8))).backward()


def test_rank_that_exits_in_join(ranks: Ranks) -> None:
    waiting, _ = ranks(2).run_expecting_failures(rank_1_exits_in_join)
    assert waiting.kind == "ReductionError"
    assert "message between the ranks of a Join failed" in waiting.message
    assert "Where each rank was when it last posted" in waiting.message


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )


def train_until_it_raises(_rank: int, port: int) -> None:
    shared = dist.TCPStore("127.0.0.1", port, is_master=False)
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0, get_group_store=lambda: shared)
    statuses = RankStatuses(GroupStore(group, "test/"), 0, range(2))
    post_uncaught_error(statuses)
    statuses.note("backward of iteration", 3)
    raise ValueError("a hook refused the gradient")


def in_a_process_of_torch(method: str, port: int) -> str:
    context_of_copies()
    with pytest.raises(mp.ProcessRaisedException) as raised:
        mp.start_processes(train_until_it_raises, (port,), start_method=method)
    return str(raised.value)


def in_a_process_of_python(port: int) -> str:
    ended = run_in_copy(train_until_it_raises, 0, port)
    assert ended.exit_code == 1
    return ended.stderr


def in_an_interpreter(port: int) -> str:
    return run_python("-c", f"from {__name__} import train_until_it_raises as run; run(0, {port})").stderr


@pytest.mark.parametrize(
    "start",
    [
        partial(in_a_process_of_torch, "forkserver"),
        pytest.param(partial(in_a_process_of_torch, "spawn"), marks=pytest.mark.long),
        in_a_process_of_python,
        pytest.param(in_an_interpreter, marks=pytest.mark.long),
    ],
    ids=["torch's, forkserver", "torch's, spawn", "Python's", "interpreter"],
)
def test_uncaught_error_is_posted(start: Callable[[int], str]) -> None:
    timeout = timedelta(seconds=15)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    assert "a hook refused the gradient" in start(store.port)
    rank_status = store.get("test/rank_status/0").decode()
    assert rank_status.endswith("backward of iteration 3: raised ValueError: a hook refused the gradient")


@pytest.mark.long
def test_frozen_store_leaves_exit_code() -> None:
    ended = run_python(str(Path(__file__).with_name("frozen_store.py")))
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout.startswith("no answer within")
