"""When each parameter's gradient is ready: the position of its earliest use, read from the end of the graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import record
from torch import fx, nn

from ddp_compile.passes.analysis.grad_ready_order import grad_ready_order


def order(gm: fx.GraphModule, parameter_of: dict[str, int]) -> list[tuple[int, str]]:
    """(parameter, name of the node that uses it first), in gradient-ready order."""
    nodes = list(gm.graph.nodes)
    return [(parameter, nodes[position].name) for parameter, position in grad_ready_order(gm, parameter_of).items()]


def without_gradient(x: Any, p0: Any) -> Any:
    with torch.no_grad():
        norm = torch.sum(p0)
    return torch.matmul(torch.mul(x, norm), p0)


USES: dict[str, tuple[Callable[..., Any], list[tuple[int, str]]]] = {
    "one node, by keyword: reverse registration order": (
        lambda x, p0, p1: F.linear(x, bias=p1[0], weight=p0),
        [(1, "linear"), (0, "linear")],
    ),
    "inside a list": (lambda x, p0, p1: torch.cat([torch.cat([x, p0]), p1]), [(1, "cat_1"), (0, "cat")]),
    "under two names: the earliest": (
        lambda x, p0_embedding, p1, p0_head: torch.matmul(torch.matmul(torch.matmul(x, p0_embedding), p1), p0_head),
        [(1, "matmul_1"), (0, "matmul")],
    ),
    "indexed by a tensor": (lambda ids, p0, p1: torch.matmul(p0[ids], p1), [(1, "matmul"), (0, "getitem")]),
    "indexed by a number: no use": (lambda p0, p1: torch.add(p0[0], torch.sum(p1)), [(0, "add"), (1, "sum_1")]),
    "without gradient: no use": (without_gradient, [(0, "matmul")]),
    "detached: not listed": (lambda x, p0: torch.matmul(x, p0.detach()), []),
    "a view that is an output is ready at once": (
        lambda x, p0, p1: (p0.t(), torch.matmul(x, p1)),
        [(0, "output"), (1, "matmul")],
    ),
    "unused: not listed": (lambda x, p0, p1: torch.matmul(x, p1), [(1, "matmul")]),
    "a parameter that is another's input": (lambda x, p0: torch.matmul(x, p0), [(0, "matmul")]),
    "views of views, as functions and methods": (
        lambda x, p0: (
            torch.sin(x),
            torch.sum(torch.ops.aten.unsqueeze.default(torch.transpose(torch.reshape(p0, (2, 8)), 0, 1), 0)),
        ),
        [(0, "sum_1")],
    ),
}


@pytest.mark.parametrize("case", USES)
def test_ready_at_earliest_use(case: str) -> None:
    function, expected = USES[case]
    assert order(*record(function, ids=torch.tensor([0, 1]), x=nn.Parameter(torch.ones(4, 4)))) == expected
