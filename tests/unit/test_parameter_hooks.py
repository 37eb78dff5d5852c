"""Which gradients the reducer is told of, and which are only counted."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_compile.runtime.parameter_hooks import ParameterHooks


class Listener:
    def __init__(self) -> None:
        self.heard: list[int] = []

    def mark_parameter_ready(self, index: int) -> None:
        self.heard.append(index)


def parameters(count: int) -> list[Parameter]:
    return [Parameter(torch.ones(2)) for _ in range(count)]


def backward(used: list[Parameter]) -> None:
    """Gradients arrive from the last one used to the first."""
    x = torch.ones(2)
    for parameter in used:
        x = x * parameter
    x.sum().backward()


def test_at_first_every_gradient_is_told() -> None:
    listener, params = Listener(), parameters(4)
    hooks = ParameterHooks(params, listener)
    backward(params)
    assert listener.heard == [3, 2, 1, 0]
    hooks.remove()
    backward(params)
    assert len(listener.heard) == 4


def test_counting_tells_the_last_of_each_bucket_and_what_is_not_missing() -> None:
    listener, params = Listener(), parameters(6)
    hooks = ParameterHooks(params, listener)
    first, second = {3, 4, 5}, {0, 1, 2}
    hooks.count([second] * 3 + [first] * 3)
    backward(params)
    assert listener.heard == [3, 0]
    assert (first, second) == ({3}, {0})  # the listener itself takes the last one off
    backward([params[5]])
    assert listener.heard == [3, 0, 5]


def test_after_counting_every_gradient_is_told_again() -> None:
    listener, params = Listener(), parameters(3)
    hooks = ParameterHooks(params, listener)
    missing = {0, 1, 2}
    hooks.count([missing] * 3)
    hooks.call_for_each()
    backward(params)
    assert listener.heard == [2, 1, 0]
    assert missing == {0, 1, 2}


def test_a_hook_of_the_users_runs_before_even_if_registered_later() -> None:
    listener, params = Listener(), parameters(2)
    hooks = ParameterHooks(params, listener)

    def note(_parameter: Tensor) -> None:
        listener.heard.append(-1)

    params[1].register_post_accumulate_grad_hook(note)
    hooks.run_last()
    backward(params)
    assert listener.heard == [-1, 1, 0]


def test_hooks_keep_neither_the_listener_nor_a_cycle_alive() -> None:
    listener, params = Listener(), parameters(2)
    hooks = ParameterHooks(params, listener)
    hooks.count([{0, 1}] * 2)
    alive = weakref.ref(listener)
    of_parameter = weakref.ref(params[0])
    gc.disable()
    try:
        del listener, hooks
        assert alive() is None
        backward(params)  # nobody listens any more
        del params
        assert of_parameter() is None
    finally:
        gc.enable()
