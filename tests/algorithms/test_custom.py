"""The algorithms of the examples: what each sends and keeps, beside one process, and that it resumes."""

import copy
import math
import os
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
from averages import Simulation, make_model, train_step
from beside import flat_of, is_same_everywhere, of_all_ranks, own_batch, seeded
from in_ci import only
from models import Mlp, loss_of
from process_copies import run_in_copy
from rank_pool import on_ranks
from torch import Tensor, nn

from custom_algorithm import TopK
from ddp_compile import ddp_compile
from parameter_algorithm import SlowMomentum

EXAMPLES = Path(__file__).parents[2] / "examples"
WIDTH, RATIO = 9, 0.1


class Reversed(Mlp):
    """In no graph, and not used in the order of registration: its buckets are packed again after the first step."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


WAYS = [(Mlp, "backward", "aot_eager"), (Mlp, "forward", "aot_eager"), (Reversed, "none", "eager")]


def replicated(plain: nn.Module, split: str, backend: str) -> Any:
    settings: Any = {"bucket_cap_mb": 0.0004, "split": split, "backend": backend}
    return ddp_compile(copy.deepcopy(plain), algorithm=TopK(RATIO), **settings)


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model(own_batch(step, WIDTH, 6))).backward()
    return {name: p.grad.flatten() for name, p in model.named_parameters()}


def train(model: nn.Module, steps: Iterable[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Gradients of each step, whose parameters have not changed yet."""
    for step in steps:
        yield step, gradients(model, step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad


@pytest.mark.parametrize("world_size", only([3], [2, 3]))
@on_ranks()
def test_largest_values_are_sent_and_others_kept(world_size: int) -> None:
    for make, *settings in WAYS:
        plain = seeded(partial(make, WIDTH, 3))
        model = replicated(plain, *settings)
        kept = {name: torch.zeros(p.numel()) for name, p in plain.named_parameters()}
        for step, reduced in train(model, range(4)):
            plain.load_state_dict(model.state_dict())
            own = {name: g / world_size + kept[name] for name, g in gradients(plain, step).items()}
            kept = dict(zip(own, model.comm_algorithm.state_dict()["residuals"], strict=True))
            is_sent = {name: residual == 0 for name, residual in kept.items()}
            for name, of_all in reduced.items():
                torch.testing.assert_close(of_all, of_all_ranks(own[name] * is_sent[name]).sum(0))
                torch.testing.assert_close(kept[name], own[name] * ~is_sent[name])
                assert is_same_everywhere(of_all)
            if step == 0:  # whose buckets may be others
                continue
            assert len(model.bucket_plan.buckets) > 1
            for bucket in model.bucket_plan.buckets:
                of_bucket, values = (torch.cat([of[g.fqn] for g in bucket.gradients]) for of in (is_sent, own))
                assert of_bucket.sum() == math.ceil(RATIO * len(values))
                assert values[of_bucket].abs().min() > values[~of_bucket].abs().max()


@on_ranks(2)
def test_resumes_from_its_state() -> None:
    """Four steps without a break, with one, and with one after which the residuals are zero again."""
    plain, (_, *settings) = seeded(lambda: Mlp(WIDTH, 3)), WAYS[0]
    ends = []
    for factor in (None, 1.0, 0.0):
        model = replicated(plain, *settings)
        list(train(model, range(2)))
        if factor is not None:
            state = model.comm_algorithm.state_dict()
            model = replicated(model, *settings)
            model.comm_algorithm.load_state_dict({"residuals": [factor * each for each in state["residuals"]]})
        list(train(model, range(2, 4)))
        ends.append(flat_of(model))
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("world_size", only([3], [1, 2, 3]))
@on_ranks(eagerly=True)
def test_slow_momentum_matches_one_process(world_size: int) -> None:
    settings = SlowMomentum(interval=3, momentum=0.7)
    model, optimizer = make_model(settings)
    simulation = Simulation(copy.deepcopy(model), world_size)
    x, slow = flat_of(model), torch.zeros(flat_of(model).numel())
    states: Any = None
    for step in range(7):
        if step == 5:
            states = copy.deepcopy([part.state_dict() for part in (model, optimizer, model.comm_algorithm)])
        train_step(model, optimizer, step)
        simulation.compute_gradients(step)
        simulation.step()
        if step % 3 == 0:
            slow = 0.7 * slow + (x - torch.stack(simulation.flats()).mean(0))
            x = x - slow
            for rank in range(world_size):
                simulation.set(rank, x)
            assert is_same_everywhere(flat_of(model))
        assert (flat_of(model) - simulation.flats()[dist.get_rank()]).abs().max() < 1e-5, step
    again, optimizer = make_model(settings)
    for part, state in zip((again, optimizer, again.comm_algorithm), states, strict=True):
        part.load_state_dict(state)
    for step in range(5, 7):
        train_step(again, optimizer, step)
    assert torch.equal(flat_of(again), flat_of(model))


def found_in_output(script: str, pattern: str) -> list[Any]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = ["--standalone", "--nproc-per-node", "2", str(EXAMPLES / script)]
    done = run_in_copy(torch.distributed.run.main, command, environment=environment, timeout_s=100)
    assert done.exit_code == 0, done.stdout + done.stderr
    return re.findall(pattern, done.stdout)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(250)
def test_scripts_train() -> None:
    pattern = r"step (\d+): loss ([\d.]+); (\d+) bytes sent a step, (\d+) by an all-reduce"
    lines = found_in_output("custom_algorithm.py", pattern)
    steps, losses, sent, whole = ([float(each) for each in column] for column in zip(*lines, strict=True))
    assert steps == [40, 80, 120, 160, 200]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 2
    assert all(each == 8 * 1001 for each in sent) and all(each == 4 * 100100 for each in whole)
    ends = found_in_output("parameter_algorithm.py", r"rank \d: loss ([\d.]+), sum of all weights ([-\d.]+)")
    assert len(ends) == 2 and ends[0][1] == ends[1][1] and all(float(loss) < 0.05 for loss, _ in ends)
