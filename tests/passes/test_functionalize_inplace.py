"""In-place sums become out-of-place ones if the difference cannot be seen; other writes return their target."""

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import GraphBuilder, capture, context
from torch import Tensor

from ddp_compile.passes.analysis.cut_constraints import find_held_cuts
from ddp_compile.passes.forward.functionalize_inplace import functionalize_inplace_pass
from ddp_compile.passes.forward.unalias_inplace_results import unalias_inplace_results_pass

CONTEXT = context({})


def residual(x: Tensor) -> Tensor:
    y = x.sin()
    for _ in range(3):
        y += y.cos()
    y.mul_(2)
    y -= 1
    return y


def read_under_the_old_name(x: Tensor) -> Tensor:
    y = x.sin()
    z = y
    z += x
    return y * z


@pytest.mark.parametrize(("function", "num"), [(residual, 5), (read_under_the_old_name, 1)])
def test_inplace_sums_become_out_of_place(function: Callable[[Tensor], Tensor], num: int) -> None:
    gm, inputs = capture(function, torch.rand(3))
    expected = gm(*inputs)
    assert find_held_cuts(gm) != []
    gm, num_changed, _ = functionalize_inplace_pass(gm, CONTEXT)
    gm.recompile()
    assert num_changed == num and find_held_cuts(gm) == []
    torch.testing.assert_close(gm(*inputs), expected, rtol=0, atol=0)


def on_an_input(x: Tensor) -> Tensor:
    x += 1
    return x.sin()


def with_a_view_that_looks_on(x: Tensor) -> Tensor:
    y = x.sin()
    row = y.view(-1)
    y += 1
    return row * 2


def with_another_dtype(x: Tensor) -> Tensor:
    y = x.half()
    y += x
    return y


def on_integers(x: Tensor) -> Tensor:
    y = x.long()
    y += 1
    return y


def on_other_strides(x: Tensor) -> Tensor:
    y = x.sin().unflatten(0, (1, -1)).expand(2, 3).clone().t()
    y += 1
    return y


def without_history(x: Tensor) -> Tensor:
    y = x.sin()
    with torch.no_grad():
        y += 1
    return y


@pytest.mark.parametrize(
    "function",
    [on_an_input, with_a_view_that_looks_on, with_another_dtype, on_integers, on_other_strides, without_history],
)
def test_visible_writes_stay_in_place(function: Callable[[Tensor], Tensor]) -> None:
    gm, _ = capture(function, torch.rand(3))
    assert functionalize_inplace_pass(gm, CONTEXT).num_changed == 0


def test_inplace_results_become_targets() -> None:
    build = GraphBuilder()
    x, count = build.input("x"), build.input("count", torch.zeros(()))
    y = build.call(torch.sin, x)
    first = build.call(operator.iadd, count, 1)
    y = build.call(F.relu, y, inplace=True)
    second = build.call("add_", first, 1)
    gm = build.output(build.call(torch.mul, y, second))
    expected = gm(torch.ones(4, 4), torch.zeros(()))
    assert find_held_cuts(gm) != []

    gm, num_changed, _ = unalias_inplace_results_pass(gm, CONTEXT)
    gm.recompile()
    assert num_changed == 3
    assert [node.args[0].name for node in gm.graph.nodes if node.target in ("add_", operator.iadd)] == ["count"] * 2
    assert [held.reason for held in find_held_cuts(gm)] == ["relu writes into sin"]
    torch.testing.assert_close(gm(torch.ones(4, 4), torch.zeros(())), expected)
