"""Which parameter changes count as an optimizer step with gradients from ``no_sync``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

from ddp_compile.runtime.desync.local_steps import LocalSteps


def step(parameter: Parameter) -> None:
    torch.optim.SGD([parameter], lr=0.1).step()


def step_and_drop(parameter: Parameter) -> None:
    step(parameter)
    parameter.grad = None


def step_fused_and_drop(parameter: Parameter) -> None:
    torch.optim.SGD([parameter], lr=0.1, fused=True).step()
    parameter.grad = None


def step_another(parameter: Parameter) -> None:
    other = Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    torch.optim.SGD([other], lr=0.1, fused=True).step()
    parameter.grad = None


def step_and_zero(parameter: Parameter) -> None:
    step(parameter)
    assert parameter.grad is not None
    parameter.grad.zero_()


def drop_a_bad_micro_batch(parameter: Parameter) -> None:
    parameter.grad = None


def swap_weights_for_an_evaluation(parameter: Parameter) -> None:
    own = parameter.detach().clone()
    with torch.no_grad():
        parameter.zero_()
        parameter.copy_(own)


@pytest.mark.parametrize(
    ("between", "found"),
    [
        (step_and_drop, 1),
        (step_fused_and_drop, 1),
        (step_and_zero, 1),
        (step_another, 0),
        (drop_a_bad_micro_batch, 0),
        (swap_weights_for_an_evaluation, 0),
    ],
)
def test_steps_found(between: Callable[[Parameter], None], found: int) -> None:
    parameter = Parameter(torch.ones(3))
    steps = LocalSteps([parameter])
    for _ in range(2):
        parameter.sum().backward()
        steps.gradient_arrives(0)
    between(parameter)
    steps.forward_begins()
    parameter.grad = torch.ones(3)  # of a backward that was reduced
    step_and_drop(parameter)
    steps.forward_begins()
    assert steps.num_found == found
