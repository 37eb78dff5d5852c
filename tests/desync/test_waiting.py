"""Errors of ranks that wait in vain say where each rank stands; docs/divergence.md lists them.

The expected errors of two ranks come at different times. So that neither sees the other's connection break, the ranks
wait for each other in a separate group afterward.
"""

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from differing_ranks import TIMEOUT_S, run_and_meet
from models import Mlp, loss_of
from rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp_compile import ddp_compile

Scenario = Callable[[dist.ProcessGroup], None]

NUM_POOLS = 4  #: that wait at the same time
WIDTH = 8


def make_model(group: dist.ProcessGroup, **settings: Any) -> nn.Module:
    torch.manual_seed(3)
    settings = {"backend": "eager", "bucket_cap_mb": 4e-4, **settings}
    return ddp_compile(Mlp(width=WIDTH, num_layers=2), process_group=group, **settings)


def some_rows() -> Tensor:
    return torch.randn(4, WIDTH)


def forward_and_backward(model: nn.Module) -> None:
    loss_of(model(some_rows())).backward()


def evaluate_for_long(group: dist.ProcessGroup) -> None:
    model = make_model(group)
    forward_and_backward(model)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.eval()(some_rows())
        return
    forward_and_backward(model)


def compile_for_long(group: dist.ProcessGroup) -> None:
    def slow_on_rank_1(gm: Any, _inputs: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(TIMEOUT_S + 3)
            raise KeyError("not needed any more")
        return gm.forward

    model = make_model(group, backend=slow_on_rank_1)
    forward_and_backward(model)


def after_one_iteration(model: nn.Module, on_rank_1: Callable[[Any], object]) -> None:
    forward_and_backward(model)
    if dist.get_rank() == 1:
        on_rank_1(model)
    forward_and_backward(model)


def replicate_on_rank_0(group: dist.ProcessGroup) -> None:
    if dist.get_rank() == 0:
        make_model(group)


def replicate_again_on_rank_0(group: dist.ProcessGroup) -> None:
    make_model(group)
    replicate_on_rank_0(group)


def forward_once_more_with_buffers(group: dist.ProcessGroup) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    after_one_iteration(ddp_compile(model, process_group=group, backend="eager"), lambda model: model(some_rows()))


def stop_early(group: dist.ProcessGroup) -> None:
    model = make_model(group)
    for _ in range(3 - dist.get_rank()):
        forward_and_backward(model)


class RaisesInForward(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            raise KeyError("bad sample")
        return super().forward(x)


def raise_in_forward(group: dist.ProcessGroup) -> None:
    model = ddp_compile(RaisesInForward(WIDTH, 2), process_group=group, backend="eager")
    after_one_iteration(model, lambda model: model(torch.randn(1, WIDTH)))


def refuse(_gradient: Tensor) -> None:
    raise ValueError("bad gradient")


def raise_in_backward(group: dist.ProcessGroup) -> None:
    after_one_iteration(make_model(group), lambda model: model.layers[0].weight.register_hook(refuse))


class Branches(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers[dist.get_rank()](x)


def take_another_branch(group: dist.ProcessGroup) -> None:
    model = ddp_compile(Branches(WIDTH, 2), process_group=group, backend="eager", bucket_cap_mb=1e-4)
    for _ in range(2):
        forward_and_backward(model)


def register_a_hook_on_rank_1(group: dist.ProcessGroup) -> None:
    hook = default_hooks.allreduce_hook
    after_one_iteration(make_model(group), lambda model: model.register_comm_hook(None, hook))


def measure_on_rank_1(group: dist.ProcessGroup) -> None:
    def measure_late(model: Any) -> None:
        time.sleep(2)  # the rank that trains on gives up first
        model.measure(steps=3)

    after_one_iteration(make_model(group), measure_late)


@pytest.fixture(scope="module")
def said_by_ranks(
    shared_inductor_cache: Path, request: pytest.FixtureRequest
) -> Iterator[dict[Scenario, Future[list[str]]]]:
    """What `run_and_meet` returns on two ranks, for each selected scenario: they wait for timeouts at the same time."""
    pools: queue.SimpleQueue[RankPool] = queue.SimpleQueue()
    for _ in range(NUM_POOLS):
        pools.put(RankPool(2))

    def run(scenario: Scenario) -> list[str]:
        pool = pools.get()
        try:
            return pool.run(run_and_meet, scenario, scenario in (compile_for_long, take_another_branch))
        finally:
            pools.put(pool)

    items = [item for item in request.session.items if "said_by_ranks" in item.fixturenames]
    selected = [item.callspec.params["scenario"] for item in items]
    with ThreadPoolExecutor(NUM_POOLS) as executor:
        yield {scenario: executor.submit(run, scenario) for scenario in selected}
    while not pools.empty():
        pools.get().close()


@pytest.mark.parametrize(
    ("scenario", "culprit_stood", "culprit_raised"),
    [
        (replicate_on_rank_0, "never posted", "nothing"),
        (replicate_again_on_rank_0, "ddp_compile() of Mlp has returned", "nothing"),
        (evaluate_for_long, "evaluation forward 1 has returned", "nothing"),
        (compile_for_long, "training forward 1, compiling 0/0", "BackendCompilerFailed"),
        (
            forward_once_more_with_buffers,
            "training forward 3, broadcast of buffers: failed",
            "ReductionError: rank 1: the broadcast of 3 buffers from rank 0",
        ),
        (stop_early, "iteration 2 is over", "nothing"),
        (raise_in_forward, "training forward 2: raised KeyError: 'bad sample'", "KeyError"),
        pytest.param(raise_in_backward, "backward of iteration 2", "ValueError", marks=pytest.mark.long),
        (take_another_branch, "training forward 2: raised MissingGradientError: rank 1: ", "MissingGradientError"),
        (register_a_hook_on_rank_1, "registering the comm hook allreduce_hook before iteration 2", "RanksDifferError"),
        (measure_on_rank_1, "in measure(steps=3) before iteration 2", "RanksDifferError"),
    ],
)
def test_error_says_where_ranks_stand(
    scenario: Scenario, culprit_stood: str, culprit_raised: str, said_by_ranks: dict[Scenario, Future[list[str]]]
) -> None:
    waiting, culprit = said_by_ranks[scenario].result()
    assert waiting.startswith("ReductionError: rank 0: ") and culprit.startswith(culprit_raised)
    rows = waiting[waiting.index("Where each rank was when it last posted") :].splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert "failed" in rows[0] and culprit_stood in rows[1]
    if scenario is raise_in_forward:
        assert "bucket 0" in waiting and "layers.1.bias" in waiting
