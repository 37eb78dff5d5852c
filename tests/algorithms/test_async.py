"""Asynchronous model averaging: what a round does, which threads and ranks wait, and how it ends."""

import ast
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import flat_of, is_same_everywhere
from in_ci import only
from rank_pool import RankFailure, Ranks, on_ranks
from torch import nn

from ddp_compile import ddp_compile
from ddp_compile.algorithms import AsyncModelAverage
from ddp_compile.errors import ReductionError, ReplicationError

WIDTH = 6
OFTEN = AsyncModelAverage(sync_interval_ms=0.1)


def make_model(algorithm: AsyncModelAverage, **settings: Any) -> Any:
    torch.manual_seed(0)
    return ddp_compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), algorithm=algorithm, **settings)


def backward(model: Any, step: int) -> None:
    torch.manual_seed(100 * dist.get_rank() + step)
    model(torch.randn(4, WIDTH)).square().mean().backward()


def train(model: Any, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.002)


class AddsOneSlowly(torch.optim.Optimizer):
    """Reads, waits and writes, as a kernel does that takes its time."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            before = [parameter.clone() for parameter in group["params"]]
            time.sleep(0.002)
            for parameter, was in zip(group["params"], before, strict=True):
                parameter.copy_(was + 1)


@pytest.mark.parametrize("with_closure", only([True], [False, True]))
@on_ranks(2, eagerly=True)
def test_no_step_is_lost(with_closure: bool) -> None:
    """Averages keep the sum over the ranks."""
    num_steps = 60
    model = make_model(OFTEN, backend="eager")
    begin, optimizer, rank = flat_of(model), AddsOneSlowly(model.parameters()), dist.get_rank()
    own_steps = num_steps * (rank + 1)
    for step in range(own_steps):
        if with_closure:
            optimizer.step(lambda step=step: backward(model, step))
        else:
            backward(model, step)
            optimizer.step()
        model.zero_grad()
    model.comm_algorithm.abort()
    mean = num_steps * (dist.get_world_size() + 1) / 2
    off = (flat_of(model) - begin - mean).abs().max().item()
    assert off < 1e-3
    assert model.comm_algorithm.num_rounds > 10
    assert is_same_everywhere(flat_of(model))


@pytest.mark.parametrize("world_size", only([2], [1, 2, 3]))
@on_ranks(eagerly=True)
def test_abort_and_resume(world_size: int) -> None:
    model = make_model(OFTEN, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for cycle in range(60):
        train(model, optimizer, cycle)
        model.comm_algorithm.abort()
        model.comm_algorithm.abort()
        if cycle % 20 == 0:
            assert is_same_everywhere(flat_of(model))
        model.comm_algorithm.resume()
        model.comm_algorithm.resume()
    model.unwrap()
    assert sum(thread.name == "ddp_compile model average" for thread in threading.enumerate()) == 0


@on_ranks(2)
def test_lone_forwards_hold_nobody_up() -> None:
    model = make_model(AsyncModelAverage(sync_interval_ms=0.1, warmup_steps=2), backend="aot_eager")
    optimizer, algorithm = torch.optim.AdamW(model.parameters(), lr=0.01), model.comm_algorithm
    algorithm.abort()
    algorithm.resume()  # in the warm-up it ends nothing
    for step in range(12):
        with model.no_sync():
            backward(model, 50 + step)
        with torch.no_grad():
            model(torch.randn(3, WIDTH))  # counts for nothing
        model(torch.randn(3, WIDTH))  # without a backward
        (model(torch.randn(3, WIDTH)).sum() + model(torch.randn(3, WIDTH)).sum()).backward()
        assert algorithm.sends_gradients == (step < 1)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        model(torch.randn(3, WIDTH))  # the last one, on one rank, without a backward
    algorithm.abort()
    assert is_same_everywhere(flat_of(model)) and algorithm.num_rounds > 0


def goes_on_without_a_peer() -> str:
    model = make_model(OFTEN, backend="eager")
    backward(model, 0)
    if dist.get_rank() == 1:
        os._exit(1)
    try:
        for step in range(100_000):
            backward(model, step)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_killed_peer(ranks: Ranks) -> None:
    said, killed = ranks(2).run_expecting_failures(goes_on_without_a_peer, timeout_s=10.0)
    assert isinstance(killed, RankFailure)
    assert said.startswith("ReductionError: rank 0: the asynchronous model average (every 0.1 ms after 0 steps) failed")


@on_ranks(2)
def test_load_state_dict() -> None:
    model = make_model(OFTEN, backend="eager")
    backward(model, 0)
    loaded = {name: torch.full_like(value, 10.0) for name, value in model.state_dict().items()}
    with pytest.raises(ReplicationError) as refused:
        model.load_state_dict(loaded)
    model.comm_algorithm.abort()
    model.load_state_dict(loaded)
    model.comm_algorithm.load_state_dict(model.comm_algorithm.state_dict())
    model.comm_algorithm.resume()
    time.sleep(0.05)
    model.comm_algorithm.abort()
    assert (flat_of(model) - 10.0).abs().max() < 1e-4
    loading = f"rank {dist.get_rank()}: load_state_dict() was called while the asynchronous model average"
    assert str(refused.value).startswith(loading)


def add_one(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


@on_ranks(2, eagerly=True)
def test_writes_by_hand() -> None:
    model = make_model(OFTEN, backend="eager")
    algorithm, begin, num_writes = model.comm_algorithm, flat_of(model), 200
    backward(model, 0)
    for _ in range(num_writes):
        with algorithm.writing():
            add_one(model)
    wait_until(lambda: algorithm.num_rounds >= 2)
    algorithm.abort()
    off = (flat_of(model) - begin - num_writes).abs().max().item()
    add_one(model)  # nothing else writes now
    algorithm.resume()
    with algorithm.using_parameters(trains=False):
        pass
    add_one(model)
    with pytest.raises(ReductionError) as said:
        wait_until(lambda: backward(model, 0) is not None, 1.0)
    algorithm._let_go()
    assert off < 1e-3
    written = f"rank {dist.get_rank()}: parameters were written outside an optimizer's step"
    assert str(said.value).startswith(written)


@on_ranks(2, timeout_s=1.0, eagerly=True)
def test_pause_longer_than_timeout() -> None:
    """On one rank, for longer than collectives may take, while the other continues to train."""
    model = make_model(OFTEN, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, *range(30))
    if dist.get_rank() == 1:
        model(torch.randn(3, WIDTH))
        time.sleep(2.0)
    end = time.monotonic() + 2.0
    while dist.get_rank() == 0 and time.monotonic() < end:
        train(model, optimizer, 0)
        time.sleep(0.01)
    model.comm_algorithm.abort()
    assert is_same_everywhere(flat_of(model))


@torch.compiler.set_stance("force_eager")
def aborts_alone() -> str:
    model = make_model(OFTEN, backend="eager")
    backward(model, 0)
    if dist.get_rank() == 1:
        time.sleep(2.5)
        return ""
    with pytest.raises(ReductionError) as refused:
        model.comm_algorithm.abort()
    return str(refused.value)


def test_abort_of_one_rank(ranks: Ranks) -> None:
    said, _ = ranks(2).run_expecting_failures(aborts_alone, timeout_s=1.0)
    assert "cannot end, because ranks 1 have not called abort() within the process group's timeout" in said


# When the process of one rank, or its part in the averages, ends, the others hear of it within seconds.

ENDING = Path(__file__).with_name("ends_while_averaging.py")
ENDED = "rank 1 has reached the end of its process"
#: How rank 1 ends, rank 0's error, and rank 1's exit code, which is SIGTERM's if it did not end itself.
HOW = {
    "exit": (ENDED, 1),
    "blocked": (ENDED, -15),  # another exit function takes long
    "child": (ENDED, 1),  # of multiprocessing, which skips atexit
    "leave": ("rank 1 has left the averaging after an error", -15),
    "end": (ENDED, 0),  # the last line of its script
    "let_go": ("rank 1 has freed its model", -15),
}


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each scenario, what rank 0 "said" and both exit "codes". All scenarios run at the same time."""
    here = [item for item in request.session.items if item.path == request.path]
    selected = [item.callspec.params["how"] for item in here if "ended" in getattr(item, "fixturenames", ())]
    command = [sys.executable, str(ENDING), str(tmp_path_factory.mktemp("stores")), *selected]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = dict(line.split(": ", 1) for line in run.stdout.splitlines())
    return {name: ast.literal_eval(text) for name, text in lines.items()}


@pytest.mark.long
@pytest.mark.parametrize("how", HOW)
def test_rank_that_ends_is_named(how: str, ended: dict[str, Any]) -> None:
    told, exit_code = HOW[how]
    assert f"has ended, because {told} without model.comm_algorithm.abort()" in ended[f"{how} said"]
    assert ended[f"{how} codes"] == [0, exit_code]
