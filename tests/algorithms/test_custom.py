"""The algorithm of `examples/custom_algorithm.py`, compared with a slow form that has all ranks in one process."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.run
from in_ci import only
from models import Mlp, loss_of
from process_copies import run_in_copy
from rank_pool import on_ranks
from torch import Tensor, nn

from custom_algorithm import TopK
from ddp_compile import BucketPlan, ddp_compile
from ddp_compile.algorithms import AlgorithmConfig
from ddp_compile.torch_internals import queue_backward_callback

Named = dict[str, Tensor]
SCRIPT = Path(__file__).parents[2] / "examples" / "custom_algorithm.py"
WIDTH, RATIO, RATE = 9, 0.1, 0.5


class Reversed(nn.Module):
    """In no graph, and not used in the order of registration: its buckets are packed again after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def mlp() -> nn.Module:
    return Mlp(WIDTH, 3)


class Way(NamedTuple):
    """How a model is trained: its class, and settings of `ddp_compile`."""

    make: Callable[[], nn.Module]
    split: str
    backend: str


WAYS = [Way(mlp, "backward", "aot_eager"), Way(mlp, "forward", "aot_eager"), Way(Reversed, "none", "eager")]


class Step(NamedTuple):
    """What one rank has after a step.

    Args:
        buckets: Names of the parameters of each, in the order in which they were reduced.
        gradients: Every ``.grad``.
        residuals: What the rank has not sent.
    """

    buckets: list[list[str]]
    gradients: Named
    residuals: Named


class Checkpoint(NamedTuple):
    """After this many steps of one rank."""

    num_steps: int
    module: Mapping[str, Any]
    algorithm: Mapping[str, Any]


def backward(module: nn.Module, rank: int, step: int, at_the_end: Callable[[], None] = lambda: None) -> Named:
    """Gradients of a rank's batch; parameters are in the order of registration.

    Args:
        at_the_end: Called when the backward has computed all gradients, before the reducer hands them over.
    """
    torch.manual_seed(10 * step + rank)
    module.zero_grad()
    loss = loss_of(module(torch.randn(6, WIDTH)))
    loss.register_hook(lambda _: queue_backward_callback(at_the_end))
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


@torch.no_grad()
def descend(module: nn.Module, gradients: Named) -> None:
    for name, parameter in module.named_parameters():
        parameter -= RATE * gradients[name]


def made(way: Way) -> nn.Module:
    torch.manual_seed(3)
    return way.make()


def train(
    way: Way, algorithm: AlgorithmConfig, num_steps: int, begin: Checkpoint | None = None
) -> tuple[list[Step], Checkpoint]:
    model = ddp_compile(made(way), algorithm=algorithm, bucket_cap_mb=0.0004, split=way.split, backend=way.backend)
    if begin is not None:
        model.load_state_dict(begin.module)
        model.comm_algorithm.load_state_dict(begin.algorithm)
    first = 0 if begin is None else begin.num_steps
    steps = []
    plans: list[BucketPlan] = []
    for step in range(first, first + num_steps):
        gradients = backward(model, torch.distributed.get_rank(), step, lambda: plans.append(model.bucket_plan))
        descend(model, gradients)
        buckets = [[gradient.fqn for gradient in bucket.gradients] for bucket in plans[-1].buckets]
        residuals = model.comm_algorithm.state_dict().get("residuals", [])
        steps.append(Step(buckets, gradients, dict(zip(gradients, residuals, strict=False))))
    module = {name: value.clone() for name, value in model.state_dict().items()}
    return steps, Checkpoint(first + num_steps, module, model.comm_algorithm.state_dict())


def simulate(way: Way, world_size: int, plans: list[list[list[str]]]) -> list[tuple[Named, list[Named]]]:
    """The gradients and every rank's residuals in each step, value by value."""
    module = made(way)
    residuals = [{name: torch.zeros(p.numel()) for name, p in module.named_parameters()} for _ in range(world_size)]
    steps = []
    for step, buckets in enumerate(plans):
        own = [backward(module, rank, step) for rank in range(world_size)]
        means: Named = {}
        for names in buckets:
            sizes = [own[0][name].numel() for name in names]
            total = torch.zeros(sum(sizes))
            for gradients, kept in zip(own, residuals, strict=True):
                flat = torch.cat([gradients[name].flatten() for name in names]) * (1.0 / world_size)
                flat = flat + torch.cat([kept[name] for name in names])
                magnitudes = flat.abs().tolist()
                chosen = sorted(range(len(flat)), key=lambda i: magnitudes[i])[-math.ceil(RATIO * len(flat)) :]
                for i in chosen:
                    total[i] += flat[i]
                    flat[i] = 0.0
                kept.update(zip(names, flat.split(sizes), strict=True))
            means.update(
                (name, part.view_as(own[0][name])) for name, part in zip(names, total.split(sizes), strict=True)
            )
        descend(module, means)
        steps.append((means, [dict(kept) for kept in residuals]))
    return steps


def assert_same_bits(ours: Named, expected: Named) -> None:
    assert ours.keys() == expected.keys()
    for name in ours:
        assert torch.equal(ours[name], expected[name]), name


@pytest.mark.parametrize("world_size", only([3], [2, 3]))
@on_ranks()
def test_steps_match_one_process(world_size: int) -> None:
    for way in WAYS:
        steps = train(way, TopK(RATIO), 4)[0]
        plans = [step.buckets for step in steps]
        assert len(plans[0]) > 1
        assert (plans[0] != plans[1]) == (way.make is Reversed)
        for step, (gradients, residuals) in zip(steps, simulate(way, world_size, plans), strict=True):
            assert_same_bits(step.gradients, gradients)
            assert_same_bits(step.residuals, residuals[torch.distributed.get_rank()])


def differing(ours: Checkpoint, theirs: Checkpoint) -> list[str]:
    ours_and_theirs = [{**each.module, **dict(enumerate(each.algorithm["residuals"]))} for each in (ours, theirs)]
    return [name for name, value in ours_and_theirs[0].items() if not torch.equal(value, ours_and_theirs[1][name])]


@on_ranks(2)
def test_resumes_from_its_state() -> None:
    """Four steps without a break, with one, and with one after which the residuals are zero again."""
    way = WAYS[0]
    _, whole = train(way, TopK(RATIO), 4)
    _, half = train(way, TopK(RATIO), 2)
    _, resumed = train(way, TopK(RATIO), 2, half)
    nothing = {"residuals": [torch.zeros_like(residual) for residual in half.algorithm["residuals"]]}
    _, forgotten = train(way, TopK(RATIO), 2, half._replace(algorithm=nothing))
    assert differing(whole, resumed) == []
    assert differing(whole, forgotten) != []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_script_trains_and_sends_less() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = ["--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = run_in_copy(torch.distributed.run.main, command, environment=environment, timeout_s=100)
    assert done.exit_code == 0, done.stdout + done.stderr
    lines = re.findall(r"step (\d+): loss ([\d.]+); (\d+) bytes sent a step, (\d+) by an all-reduce", done.stdout)
    steps, losses, sent, whole = ([float(each) for each in column] for column in zip(*lines, strict=True))
    assert steps == [40, 80, 120, 160, 200]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 2
    assert all(each == 8 * 1001 for each in sent) and all(each == 4 * 100100 for each in whole)
