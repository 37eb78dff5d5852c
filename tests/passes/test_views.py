"""Which values are views of others, and which values cross a cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import find, record
from torch import fx

from ddp_compile.passes.analysis.cut_constraints import find_held_cuts, mode_regions
from ddp_compile.passes.analysis.views import ViewTrees
from ddp_compile.passes.forward.partition_graph import partition_graph


def cut(gm: fx.GraphModule, *names: str) -> tuple[fx.GraphModule, list[fx.GraphModule]]:
    """The stitched graph of one that is cut before these calls, and its partitions."""
    stitched = partition_graph(gm, [find(gm, name) for name in names])
    calls = stitched.graph.find_nodes(op="call_module")
    return stitched, [stitched.get_submodule(node.target) for node in calls]


def inputs(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.find_nodes(op="placeholder")]


def outputs(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.output_node().all_input_nodes]


def calls(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op in ("call_method", "call_function")]


def view_and_its_base(x: Any) -> Any:
    y = torch.sin(x).t()
    target = y.detach()
    return torch.mul(torch.cos(y), target)


def two_views(x: Any) -> Any:
    h = torch.sin(x)
    rows, columns = h.unbind(), h.t()
    row = rows[0]
    return torch.matmul(torch.cos(columns), row)


def view_of_an_input(x: Any, p0: Any) -> Any:
    turned = p0.t()
    return torch.matmul(torch.cos(torch.matmul(x, turned)), turned)


@pytest.mark.parametrize(
    ("function", "crossing", "second_calls"),
    [
        (view_and_its_base, ["t"], ["detach", "cos", "mul"]),
        (two_views, ["sin"], ["unbind", "t", "getitem", "cos", "matmul"]),
        (lambda x: torch.cos(torch.sin(x).narrow(0, 0, 1)), ["narrow"], ["cos"]),
        # An expanded value is made again, and so are views of it.
        (lambda x: torch.cos(torch.sin(x).narrow(0, 0, 1).expand(3, -1).t()), ["narrow"], ["expand", "t", "cos"]),
        (view_of_an_input, ["matmul"], ["t", "cos", "matmul_1"]),
    ],
)
def test_one_value_crosses_for_its_views(
    function: Callable[..., Any], crossing: list[str], second_calls: list[str]
) -> None:
    _, (first, second) = cut(record(function).gm, "cos")
    assert outputs(first) == crossing and calls(second) == second_calls
    assert [name for name in inputs(second) if name != "p0"] == crossing


def test_what_is_no_view() -> None:
    def function(x: Any, hook: Any) -> Any:
        h = torch.sin(x)
        reached, doubled, watched = h.as_strided((2,), (1,)), h.mul_(2), h.view(-1)
        watched.register_hook(hook)
        return reached, doubled, watched, h.t()

    gm, _ = record(function, x=torch.ones(4, 4, requires_grad=True), hook=torch.neg)
    trees = ViewTrees(gm, mode_regions(gm))
    returned = gm.graph.output_node().args[0][:3]
    assert [trees.root(node) for node in returned] == list(returned)


def user_function(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1)


def test_views_of_user_functions_hold_cuts() -> None:
    def function(call: Any, x: Any, is_returned: bool) -> Any:
        h = torch.sin(x)
        if is_returned:
            y = torch.cos(h)
            return call(user_function, h), y
        own = call(user_function, h)
        torch.cos(h)
        return torch.exp(own)

    gm, _ = record(lambda call, x: function(call, x, is_returned=False))
    (held,) = (h for h in find_held_cuts(gm) if "user_function" in h.reason)
    assert (held.first, held.last) == (find(gm, "user_function") + 1, find(gm, "exp"))
    assert held.reason == "user_function shares the memory of sin and cannot be made again as a view of it"
    # The caller gets it: it stays with its argument.
    gm, _ = record(lambda call, x: function(call, x, is_returned=True))
    assert {(h.first, h.last) for h in find_held_cuts(gm)} == {(find(gm, "sin") + 1, len(gm.graph.nodes) - 1)}
