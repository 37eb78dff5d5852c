"""When each parameter's gradient is ready: the position of its earliest use, read from the end of the graph."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from graphs import GraphBuilder, chain
from torch import fx, nn

from ddp_compile.passes.analysis.grad_ready_order import grad_ready_order


def order(gm: fx.GraphModule, parameter_of: dict[str, int]) -> list[tuple[int, str]]:
    """(parameter, name of the node that uses it first), in gradient-ready order."""
    nodes = list(gm.graph.nodes)
    return [(ready.parameter, nodes[ready.position].name) for ready in grad_ready_order(gm, parameter_of)]


def test_the_parameter_used_last_is_ready_first() -> None:
    assert order(*chain(3)) == [(2, "matmul_2"), (1, "matmul_1"), (0, "matmul")]


def test_parameters_of_one_node_come_in_reverse_registration_order() -> None:
    build = GraphBuilder()
    x = build.input("x")
    bias, weight = build.parameter(0, "bias", 4), build.parameter(1, "weight")
    y = build.call(F.linear, x, weight, bias)
    assert order(build.output(y), build.parameter_of) == [(1, "linear"), (0, "linear")]


def test_parameters_given_by_keyword_are_used() -> None:
    build = GraphBuilder()
    x = build.input("x")
    weight, bias = build.parameter(0), build.parameter(1, None, 4)
    y = build.call(F.linear, x, bias=bias, weight=weight)
    assert order(build.output(y), build.parameter_of) == [(1, "linear"), (0, "linear")]


def test_parameters_inside_a_list_are_used() -> None:
    build = GraphBuilder()
    x = build.input("x")
    first, second = build.parameter(0), build.parameter(1)
    y = build.call(torch.cat, [x, first])
    z = build.call(torch.cat, [y, second])
    assert order(build.output(z), build.parameter_of) == [(1, "cat_1"), (0, "cat")]


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("t", ()),
        ("view", (2, 8)),
        ("half", ()),
        ("to", (torch.float64,)),
        ("contiguous", ()),
        ("chunk", (2,)),
        ("unbind", (0,)),
    ],
)
def test_a_view_or_cast_at_the_top_is_no_use(method: str, args: tuple) -> None:
    build = GraphBuilder()
    x = build.input("x")
    first, second = build.parameter(0), build.parameter(1)
    seen = build.call(method, first, *args)
    if isinstance(seen.meta["example_value"], tuple):
        seen = build.call(operator.getitem, seen, 0)
    y = build.call(torch.mul, x, second)
    z = build.call(torch.sum, seen)
    assert order(build.output(y, z), build.parameter_of) == [(0, "sum_1"), (1, "mul")]


def test_views_of_views_are_no_use_and_functions_are_seen_as_methods_are() -> None:
    build = GraphBuilder()
    x = build.input("x")
    weight = build.parameter(0)
    view = build.call(torch.transpose, build.call(torch.reshape, weight, (2, 8)), 0, 1)
    view = build.call(torch.ops.aten.unsqueeze.default, view, 0)
    y = build.call(torch.sin, x)
    z = build.call(torch.sum, view)
    assert order(build.output(y, z), build.parameter_of) == [(0, "sum_1")]


def test_a_parameter_used_twice_is_ready_after_its_earliest_use() -> None:
    build = GraphBuilder()
    x = build.input("x")
    shared, other = build.parameter(0), build.parameter(1)
    x = build.call(torch.matmul, x, shared)
    x = build.call(torch.matmul, x, other)
    x = build.call(torch.matmul, x, shared)
    assert order(build.output(x), build.parameter_of) == [(1, "matmul_1"), (0, "matmul")]


def test_one_parameter_under_two_names_is_listed_once_at_its_earliest_use() -> None:
    build = GraphBuilder()
    x = build.input("x")
    embedding, other, head = build.parameter(0, "embedding"), build.parameter(1, "other"), build.parameter(0, "head")
    x = build.call(torch.matmul, x, embedding)
    x = build.call(torch.matmul, x, other)
    x = build.call(torch.matmul, x, head)
    assert order(build.output(x), build.parameter_of) == [(1, "matmul_1"), (0, "matmul")]


def test_indexing_a_parameter_with_a_tensor_is_a_use() -> None:
    build = GraphBuilder()
    ids = build.input("ids", torch.tensor([0, 1]))
    weight, other = build.parameter(0), build.parameter(1)
    rows = build.call(operator.getitem, weight, ids)
    y = build.call(torch.matmul, rows, other)
    assert order(build.output(y), build.parameter_of) == [(1, "matmul"), (0, "getitem")]


def test_indexing_a_parameter_with_a_number_is_no_use() -> None:
    build = GraphBuilder()
    weight, other = build.parameter(0), build.parameter(1)
    row = build.call(operator.getitem, weight, 0)
    y = build.call(torch.sum, other)
    z = build.call(torch.add, y, row)
    assert order(build.output(z), build.parameter_of) == [(0, "add"), (1, "sum_1")]


def test_a_node_without_gradient_is_no_use() -> None:
    build = GraphBuilder()
    x = build.input("x")
    weight = build.parameter(0)
    with torch.no_grad():
        norm = build.call(torch.sum, weight)
    x = build.call(torch.mul, x, norm)
    y = build.call(torch.matmul, x, weight)
    assert order(build.output(y), build.parameter_of) == [(0, "matmul")]


def test_a_detached_parameter_is_not_listed() -> None:
    build = GraphBuilder()
    x = build.input("x")
    y = build.call(torch.matmul, x, build.call("detach", build.parameter(0)))
    assert order(build.output(y), build.parameter_of) == []


def test_a_node_without_a_recorded_value_counts_as_a_use() -> None:
    build = GraphBuilder()
    weight = build.parameter(0)
    y = build.call(torch.sum, weight)
    del y.meta["example_value"]
    assert order(build.output(y), build.parameter_of) == [(0, "sum_1")]


def test_get_attr_parameters_are_seen() -> None:
    build = GraphBuilder()
    x = build.input("x")
    weight = build.parameter(0, "weight", get_attr=True)
    assert order(build.output(build.call(torch.matmul, x, weight)), build.parameter_of) == [(0, "matmul")]


def test_a_parameter_that_is_an_output_itself_is_ready_at_once() -> None:
    build = GraphBuilder()
    x = build.input("x")
    returned, used = build.parameter(0), build.parameter(1)
    view = build.call("t", returned)
    y = build.call(torch.matmul, x, used)
    assert order(build.output(y, view), build.parameter_of) == [(0, "output"), (1, "matmul")]


def test_an_unused_parameter_is_not_listed() -> None:
    build = GraphBuilder()
    x = build.input("x")
    build.parameter(0)
    y = build.call(torch.matmul, x, build.parameter(1))
    assert order(build.output(y), build.parameter_of) == [(1, "matmul")]


def test_other_inputs_are_no_parameters() -> None:
    build = GraphBuilder()
    x = build.input("x", nn.Parameter(torch.ones(4, 4)))
    y = build.call(torch.matmul, x, build.parameter(0))
    assert order(build.output(y), build.parameter_of) == [(0, "matmul")]
