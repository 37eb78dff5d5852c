"""An in-place operation returns the tensor it wrote into; the graph says so afterwards."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from graphs import GraphBuilder

from ddp_compile.passes.analysis.cut_constraints import find_held_cuts
from ddp_compile.passes.analysis.graph_nodes import _INPLACE_OPERATORS
from ddp_compile.passes.forward.unalias_inplace_results import unalias_inplace_results_pass
from ddp_compile.passes.pipeline import PassContext

CONTEXT = PassContext(parameter_of={}, buckets=(), graph_name="graph 0")


def test_results_of_writes_become_what_was_written() -> None:
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


def test_results_of_other_operations_stay() -> None:
    build = GraphBuilder()
    x = build.input("x")
    y = build.call(F.relu, x, inplace=False)
    y = build.call(operator.imatmul, y, y)
    gm = build.output(build.call("view", y, -1))
    assert unalias_inplace_results_pass(gm, CONTEXT).num_changed == 0


@pytest.mark.parametrize("name", sorted(_INPLACE_OPERATORS))
def test_every_operator_that_counts_as_in_place_is(name: str) -> None:
    value = torch.ones(2, 2) if "div" in name or name in ("imod", "ipow") else torch.ones(2, 2, dtype=torch.int32)
    assert hasattr(torch.Tensor, f"__{name}__")
    assert getattr(operator, name)(value, 1) is value
