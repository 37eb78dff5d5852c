"""`CommAlgorithm.after_step`: an algorithm that writes its calls down, and `examples/parameter_algorithm.py`."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
from averages import batch, make_model, micro_steps_of, train_step
from beside import flat_of, is_same_everywhere, of_all_ranks
from halves import Built
from in_ci import only
from models import Mlp, loss_of
from process_copies import run_in_copy
from rank_pool import on_ranks

from ddp_compile import ReductionError
from ddp_compile.algorithms import CommAlgorithm, Traits
from parameter_algorithm import SlowMomentum

SCRIPT = Path(__file__).parents[2] / "examples" / "parameter_algorithm.py"


class Written(CommAlgorithm):
    """Writes down the optimizers of each call, and adds one to all parameters."""

    name = "note"
    traits = Traits(payload="parameters")

    def __init__(self, period: int = 1) -> None:
        self.period, self.num_backwards, self.calls = period, 0, []  # type: ignore[var-annotated]

    def attach(self, parameters: Any) -> None:
        self.named = dict(parameters)

    @property
    def meets_others(self) -> bool:
        return (self.num_backwards + 1) % self.period == 0

    def after_backward(self) -> None:
        self.num_backwards += 1

    @torch.no_grad()
    def after_step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.calls.append([type(each).__name__ for each in optimizers])
        for parameter in self.named.values():
            parameter += 1


def written(period: int = 1) -> Any:
    return make_model(Built(lambda group: Written(period)))[0]


def backward(model: Any, step: int = 0) -> None:
    loss_of(model(batch(0, step, 0))).backward()


@torch.compiler.set_stance("force_eager")
def test_called_once_after_all_optimizers(single_rank_group: None) -> None:
    model = written()
    assert list(model.comm_algorithm.named) == [name for name, _ in model.named_parameters()]
    parts = (model.layers[:2], torch.optim.SGD), (model.layers[2:], torch.optim.Adam)
    first, second = (make(part.parameters(), lr=0.1) for part, make in parts)
    calls = model.comm_algorithm.calls
    backward(model)
    first.step()
    assert calls == []
    second.step()
    assert calls == [["SGD", "Adam"]]
    with pytest.raises(ReductionError, match="an optimizer has stepped again after the note has sent"):
        second.step()
    for each in (first, second):
        each.zero_grad()
    backward(model)
    first.step()  # the other one skips it
    first.zero_grad()
    second.zero_grad()
    backward(model)
    assert calls == [["SGD", "Adam"], ["SGD"]]


@torch.compiler.set_stance("force_eager")
def test_skipped_step(single_rank_group: None) -> None:
    """By the next forward or a checkpoint; not before a step that may still come."""
    model = written()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = model.comm_algorithm.calls
    backward(model)
    with torch.no_grad():
        model(batch(0, 0, 0))
    with model.no_sync():
        model(batch(0, 0, 0))
    assert calls == []
    optimizer.step()
    assert calls.pop() == ["SGD"]
    backward(model)
    optimizer.zero_grad()
    model(batch(0, 0, 0))
    assert calls.pop() == []
    backward(model)
    model.comm_algorithm.state_dict()
    assert calls.pop() == []
    backward(model)
    model.comm_algorithm.load_state_dict({})
    model(batch(0, 0, 0))
    assert calls == []
    backward(model)
    model.unwrap()
    assert calls == [[]]


@torch.compiler.set_stance("force_eager")
def test_micro_batches_see_the_same_parameters(single_rank_group: None) -> None:
    """Also after a step that a scaler has skipped; and only the iterations that meet others are told."""
    model = written(period=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls, num_calls = model.comm_algorithm.calls, []
    for step in range(6):
        before = []
        for micro_step in range(3):
            with nullcontext() if micro_step == 2 else model.no_sync():
                loss = loss_of(model(batch(0, step, micro_step)))
                before.append(flat_of(model))
                loss.backward()
        assert all(torch.equal(each, before[0]) for each in before)
        if step != 3:
            optimizer.step()
        optimizer.zero_grad()
        num_calls.append(len(calls))
    assert num_calls == [0, 1, 1, 1, 2, 3]
    assert calls == [["SGD"], [], ["SGD"]]


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_rank_that_skips_alone() -> None:
    """It accumulates in `no_sync` next, and the other one waits in its step."""
    model, optimizer = make_model(SlowMomentum(interval=1))
    for step in range(4):
        train_step(model, optimizer, 2)  # of two micro-batches
        if step == 1 and dist.get_rank() == 0:
            loss_of(model(batch(0, step, 0)) * float("nan")).backward()
            optimizer.zero_grad()
        elif step == 1:
            loss_of(model(batch(0, step, 0))).backward()
            optimizer.step()
    assert is_same_everywhere(flat_of(model)) and flat_of(model).isfinite().all()


# The example.


@pytest.mark.parametrize("world_size", only([3], [1, 2, 3]))
@on_ranks()
@torch.compiler.set_stance("force_eager")
def test_example_matches_one_process(world_size: int) -> None:
    settings = SlowMomentum(interval=3, momentum=0.7)
    model, optimizer = make_model(settings)
    by_hand = Mlp(17, 4)
    by_hand.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(by_hand.parameters(), lr=0.01)
    x, slow = flat_of(by_hand), torch.zeros(flat_of(by_hand).numel())
    states: Any = None
    for step in range(7):
        if step == 5:
            states = copy.deepcopy([part.state_dict() for part in (model, optimizer, model.comm_algorithm)])
        train_step(model, optimizer, step)
        plain.zero_grad()
        for micro_step in range(micro_steps_of(step)):
            loss_of(by_hand(batch(dist.get_rank(), step, micro_step))).backward()
        plain.step()
        if step % 3 == 0:
            slow = 0.7 * slow + (x - of_all_ranks(flat_of(by_hand)).mean(0))
            x = x - slow
            torch.nn.utils.vector_to_parameters(x.clone(), by_hand.parameters())
            assert is_same_everywhere(flat_of(model))
        assert (flat_of(model) - flat_of(by_hand)).abs().max() < 1e-5, step
    again, optimizer = make_model(settings)
    for part, state in zip((again, optimizer, again.comm_algorithm), states, strict=True):
        part.load_state_dict(state)
    for step in range(5, 7):
        train_step(again, optimizer, step)
    assert torch.equal(flat_of(again), flat_of(model))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_script_trains() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = ["--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = run_in_copy(torch.distributed.run.main, command, environment=environment, timeout_s=100)
    assert done.exit_code == 0, done.stdout + done.stderr
    ends = re.findall(r"rank \d: loss ([\d.]+), sum of all weights ([-\d.]+)", done.stdout)
    assert len(ends) == 2 and ends[0][1] == ends[1][1] and all(float(loss) < 0.05 for loss, _ in ends)
