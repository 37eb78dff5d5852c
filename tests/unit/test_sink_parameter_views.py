"""Views and casts of parameters move to their first use, where that changes nothing else."""

from __future__ import annotations

import operator

import pytest
import torch
from graphs import GraphBuilder, context
from torch import fx

from ddp_compile.passes.forward.sink_parameter_views import sink_parameter_views_pass


def sink(build: GraphBuilder, gm: fx.GraphModule) -> tuple[list[str], int]:
    """Names of the calls after the pass, and how many nodes it says it has moved."""
    before = [gm.get_parameter(n.target) if n.op == "get_attr" else n.meta["example_value"] for n in inputs_of(gm)]
    expected = gm(*before)
    result = sink_parameter_views_pass(gm, context(build.parameter_of))
    result.gm.graph.lint()
    result.gm.recompile()
    torch.testing.assert_close(result.gm(*before), expected, rtol=0, atol=0)
    assert result.gm is gm and result.declined == ()
    return [node.name for node in gm.graph.nodes if node.op.startswith("call")], result.num_changed


def inputs_of(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="placeholder")


def test_a_cast_at_the_top_moves_to_its_use() -> None:
    build = GraphBuilder()
    x, weight = build.input("x"), build.parameter(0)
    cast = build.call("double", weight)
    y = build.call("double", build.call(torch.sin, x))
    gm = build.output(build.call(torch.matmul, y, cast))
    assert sink(build, gm) == (["sin", "double_1", "double", "matmul"], 1)


def test_a_chain_of_views_moves_as_a_whole() -> None:
    build = GraphBuilder()
    x, weight = build.input("x"), build.parameter(0)
    view = build.call("t", build.call("view", weight, 4, 4))
    parts = build.call("chunk", view, 2)
    part = build.call(operator.getitem, parts, 1)
    y = build.call(torch.sin, x)
    gm = build.output(build.call(torch.matmul, part, y))
    assert sink(build, gm) == (["sin", "view", "t", "chunk", "getitem", "matmul"], 4)


def test_a_view_with_two_uses_moves_to_the_first() -> None:
    build = GraphBuilder()
    x, weight = build.input("x"), build.parameter(0)
    view = build.call("t", weight)
    y = build.call(torch.sin, x)
    y = build.call(torch.matmul, y, view)
    gm = build.output(build.call(torch.matmul, y, view))
    assert sink(build, gm) == (["sin", "t", "matmul", "matmul_1"], 1)


def test_a_view_that_stands_right_before_its_use_stays() -> None:
    build = GraphBuilder()
    x, weight = build.input("x"), build.parameter(0)
    y = build.call(torch.sin, x)
    gm = build.output(build.call(torch.matmul, y, build.call("t", weight)))
    assert sink(build, gm) == (["sin", "t", "matmul"], 0)


def test_views_of_two_parameters_move_past_each_other() -> None:
    build = GraphBuilder()
    x, *weights = build.input("x"), build.parameter(0), build.parameter(1)
    first, second = (build.call("t", weight) for weight in weights)
    y = build.call(torch.matmul, x, first)
    gm = build.output(build.call(torch.matmul, y, second))
    assert sink(build, gm) == (["t", "matmul", "t_1", "matmul_1"], 1)


def test_views_of_other_inputs_stay() -> None:
    build = GraphBuilder()
    x, weight = build.input("x"), build.parameter(0)
    view = build.call("t", x)
    y = build.call(torch.sin, weight)
    gm = build.output(build.call(torch.matmul, y, view))
    assert sink(build, gm) == (["t", "sin", "matmul"], 0)


def test_a_parameter_indexed_by_a_tensor_stays() -> None:
    build = GraphBuilder()
    ids, weight = build.input("ids", torch.tensor([0, 1])), build.parameter(0)
    rows = build.call(operator.getitem, weight, ids)
    y = build.call(torch.sin, weight)
    gm = build.output(build.call(torch.matmul, rows, y))
    assert sink(build, gm) == (["getitem", "sin", "matmul"], 0)


@pytest.mark.parametrize("through_view", [False, True])
def test_a_view_of_a_parameter_that_is_written_stays(through_view: bool) -> None:
    build = GraphBuilder()
    x, weight = build.input("x"), build.parameter(0)
    copy = build.call("clone", weight)
    written = build.call("detach", weight)
    if through_view:
        written = build.call(operator.getitem, written, 0)
    build.call("mul_", written, 2.0)
    gm = build.output(build.call(torch.matmul, x, copy))
    names = [node.name for node in gm.graph.nodes if node.op.startswith("call")]
    result = sink_parameter_views_pass(gm, context(build.parameter_of))
    assert result.num_changed == 0
    assert [node.name for node in gm.graph.nodes if node.op.startswith("call")] == names


def test_a_write_to_one_parameter_does_not_keep_the_views_of_others() -> None:
    build = GraphBuilder()
    x, written, weight = build.input("x"), build.parameter(0), build.parameter(1)
    view = build.call("t", weight)
    gm_write = build.graph.call_method("mul_", (build.call("detach", written), 1.0))
    gm_write.meta["example_value"] = written.meta["example_value"].detach()
    gm = build.output(build.call(torch.matmul, x, view))
    assert sink(build, gm)[0] == ["detach", "mul_", "t", "matmul"]


def test_a_view_does_not_move_into_or_out_of_a_region_without_gradients() -> None:
    build = GraphBuilder()
    x, weight = build.input("x"), build.parameter(0)
    view = build.call("t", weight)
    build.graph.call_function(torch._C._set_grad_enabled, (False,))
    y = build.call(torch.matmul, x, view)
    build.graph.call_function(torch._C._set_grad_enabled, (True,))
    gm = build.output(y)
    assert sink(build, gm)[1] == 0


def test_a_cast_does_not_move_into_an_autocast_region() -> None:
    build = GraphBuilder()
    x, weight = build.input("x"), build.parameter(0)
    view = build.call("t", weight)
    enter = build.graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None))
    y = build.call(torch.matmul, x, view)
    build.graph.call_function(torch.amp.autocast_mode._exit_autocast, (enter,))
    gm = build.output(y)
    assert sink(build, gm)[1] == 0


def test_an_unused_view_stays() -> None:
    build = GraphBuilder()
    x, weight = build.input("x"), build.parameter(0)
    build.call("t", weight)
    gm = build.output(build.call(torch.sin, x))
    assert sink(build, gm) == (["t", "sin"], 0)


def test_a_view_that_is_only_an_output_moves_to_the_end() -> None:
    build = GraphBuilder()
    x, weight = build.input("x"), build.parameter(0)
    view = build.call("t", weight)
    gm = build.output(build.call(torch.sin, x), view)
    assert sink(build, gm) == (["sin", "t"], 1)


def test_a_second_run_changes_nothing() -> None:
    build = GraphBuilder()
    x, weight = build.input("x"), build.parameter(0)
    view = build.call("t", build.call("double", weight))
    y = build.call("double", build.call(torch.sin, x))
    gm = build.output(build.call(torch.matmul, y, view))
    first, moved = sink(build, gm)
    assert moved == 2 and sink(build, gm) == (first, 0)
