"""Views and casts of parameters move to their first use if that changes nothing else."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import GraphBuilder, Recorded, calls, capture, context, record

from ddp_compile.passes.forward.sink_parameter_views import sink_parameter_views_pass


def sink(recorded: Recorded) -> tuple[list[str], int]:
    """Names of the calls after the pass, which must compute the same, and how many nodes it reports as moved."""
    gm = recorded.gm
    inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    expected = gm(*inputs)
    result = sink_parameter_views_pass(gm, context(recorded.parameter_of))
    result.gm.graph.lint()
    result.gm.recompile()
    torch.testing.assert_close(result.gm(*inputs), expected, rtol=0, atol=0)
    assert result.gm is gm and result.declined == ()
    return calls(gm), result.num_changed


def cast_at_the_top(x: Any, p0: Any) -> Any:
    cast = p0.double()
    return torch.matmul(torch.sin(x).double(), cast)


def chain_of_views(x: Any, p0: Any) -> Any:
    part = p0.view(4, 4).t().chunk(2)[1]
    return torch.matmul(part, torch.sin(x))


def two_uses(x: Any, p0: Any) -> Any:
    view = p0.t()
    return torch.matmul(torch.matmul(torch.sin(x), view), view)


def two_parameters(x: Any, p0: Any, p1: Any) -> Any:
    first, second = p0.t(), p1.t()
    return torch.matmul(torch.matmul(x, first), second)


def indexed_by_a_tensor(ids: Any, p0: Any) -> Any:
    rows = p0[ids]
    return torch.matmul(rows, torch.sin(p0))


CASES: list[tuple[Callable[..., Any], list[str], int]] = [
    (cast_at_the_top, ["sin", "double_1", "double", "matmul"], 1),
    (chain_of_views, ["sin", "view", "t", "chunk", "getitem", "matmul"], 4),
    (two_uses, ["sin", "t", "matmul", "matmul_1"], 1),
    (lambda x, p0: torch.matmul(torch.sin(x), p0.t()), ["sin", "t", "matmul"], 0),  # right before its use
    (two_parameters, ["t", "matmul", "t_1", "matmul_1"], 1),
    (indexed_by_a_tensor, ["getitem", "sin", "matmul"], 0),
]


@pytest.mark.parametrize(("function", "expected", "moved"), CASES)
def test_views_move_to_first_use(function: Callable[..., Any], expected: list[str], moved: int) -> None:
    recorded = record(function, ids=torch.tensor([0, 1]))
    assert sink(recorded) == (expected, moved)
    assert sink(recorded) == (expected, 0)


WRITTEN = {
    "itself": lambda p: p.detach(),
    "a row": lambda p: p.detach()[0],
    "windows": lambda p: p.detach().unfold(0, 1, 1),
}


@pytest.mark.parametrize("written", WRITTEN)
def test_views_of_written_parameters_stay(written: str) -> None:
    def function(x: Any, p0: Any) -> Any:
        copy = p0.clone()
        WRITTEN[written](p0).mul_(2.0)
        return torch.matmul(x, copy)

    gm, parameter_of = record(function)
    names = calls(gm)
    assert sink_parameter_views_pass(gm, context(parameter_of)).num_changed == 0
    assert calls(gm) == names


def test_casts_stay_before_a_write_through_data() -> None:
    def function(x: Any, weight: Any) -> Any:
        copy, hidden = weight.clone(), torch.sin(x)
        weight.data.mul_(2.0)
        return torch.matmul(hidden, copy)

    gm, _ = capture(function, torch.ones(4, 4), torch.nn.Parameter(torch.ones(4, 4)))
    names = calls(gm)
    assert "_get_data_attr" in names
    (weight,) = (node for node in gm.graph.find_nodes(op="placeholder") if "weight" in node.name)
    assert sink_parameter_views_pass(gm, context({weight.name: 0})).num_changed == 0
    assert calls(gm) == names


@pytest.mark.parametrize(
    ("enter", "leave"),
    [
        ((torch._C._set_grad_enabled, False), lambda _: (torch._C._set_grad_enabled, True)),
        (
            (torch.amp.autocast_mode._enter_autocast, "cpu", torch.bfloat16, True, None),
            lambda entered: (torch.amp.autocast_mode._exit_autocast, entered),
        ),
    ],
    ids=["no_grad", "autocast"],
)
def test_views_do_not_enter_regions(enter: tuple[Any, ...], leave: Callable[..., tuple[Any, ...]]) -> None:
    build = GraphBuilder()
    x, weight = build.input("x"), build.parameter(0)
    view = build.call("t", weight)
    entered = build.graph.call_function(enter[0], enter[1:])
    y = build.call(operator.matmul, x, view)
    left = leave(entered)
    build.graph.call_function(left[0], left[1:])
    assert sink(Recorded(build.output(y), build.parameter_of))[1] == 0
