"""`CommAlgorithm.after_step`: when it is called, by an algorithm that writes its calls down."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from averages import batch, make_model
from beside import flat_of
from halves import Built
from models import loss_of

from ddp_compile import ReductionError
from ddp_compile.algorithms import CommAlgorithm, Traits


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
