"""Which values are views of which others, and what of them crosses a cut."""

from __future__ import annotations

import operator

import torch
from graphs import GraphBuilder, find
from torch import fx

from ddp_compile.passes.analysis.cut_constraints import find_held_cuts, mode_regions
from ddp_compile.passes.analysis.views import ViewTrees
from ddp_compile.passes.forward.partition_graph import partition_graph


def partitions_of(stitched: fx.GraphModule) -> list[fx.GraphModule]:
    return [stitched.get_submodule(node.target) for node in stitched.graph.find_nodes(op="call_module")]


def inputs(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.find_nodes(op="placeholder")]


def outputs(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.output_node().all_input_nodes]


def calls(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op in ("call_method", "call_function")]


def trees_of(gm: fx.GraphModule) -> ViewTrees:
    return ViewTrees(gm, mode_regions(gm))


def test_a_view_and_what_it_is_a_view_of_cross_as_one_value() -> None:
    build = GraphBuilder()
    h = build.call(torch.sin, build.input("x"))
    y = build.call("t", h)
    target = build.call("detach", y)
    gm = build.output(build.call(torch.mul, build.call(torch.cos, y), target))
    first, second = partitions_of(partition_graph(gm, [find(gm, "cos")]))
    assert outputs(first) == inputs(second) == ["t"]
    assert calls(second) == ["detach", "cos", "mul"]


def test_two_views_cross_as_what_both_are_views_of() -> None:
    build = GraphBuilder()
    h = build.call(torch.sin, build.input("x"))
    rows, columns = build.call("unbind", h), build.call("t", h)
    row = build.call(operator.getitem, rows, 0)
    gm = build.output(build.call(torch.matmul, build.call(torch.cos, columns), row))
    first, second = partitions_of(partition_graph(gm, [find(gm, "cos")]))
    assert outputs(first) == inputs(second) == ["sin"]
    assert calls(second) == ["unbind", "t", "getitem", "cos", "matmul"]


def test_a_single_view_crosses_as_itself() -> None:
    build = GraphBuilder()
    h = build.call(torch.sin, build.input("x"))
    gm = build.output(build.call(torch.cos, build.call("narrow", h, 0, 0, 1)))
    first, second = partitions_of(partition_graph(gm, [find(gm, "cos")]))
    assert outputs(first) == inputs(second) == ["narrow"]


def test_an_expanded_value_is_made_again_and_views_of_it_too() -> None:
    build = GraphBuilder()
    h = build.call("narrow", build.call(torch.sin, build.input("x")), 0, 0, 1)
    expanded = build.call("expand", h, 3, -1)
    gm = build.output(build.call(torch.cos, build.call("t", expanded)))
    first, second = partitions_of(partition_graph(gm, [find(gm, "cos")]))
    assert outputs(first) == inputs(second) == ["narrow"]
    assert calls(second) == ["expand", "t", "cos"]


def test_no_view_of_an_input_crosses() -> None:
    build = GraphBuilder()
    x, weight = build.input("x"), build.parameter(0)
    turned = build.call("t", weight)
    y = build.call(torch.matmul, x, turned)
    gm = build.output(build.call(torch.matmul, build.call(torch.cos, y), turned))
    first, second = partitions_of(partition_graph(gm, [find(gm, "cos")]))
    assert outputs(first) == ["matmul"]
    assert inputs(second) == ["matmul", "p0"] and calls(second) == ["t", "cos", "matmul_1"]


def test_views_beside_what_they_are_views_of_are_made_for_the_caller() -> None:
    build = GraphBuilder()
    h = build.call(torch.sin, build.input("x"))
    y = build.call("t", h)
    target = build.call("detach", y)
    gm = build.output(build.call(torch.cos, h), y, target)
    stitched = partition_graph(gm, [find(gm, "cos")])
    assert outputs(partitions_of(stitched)[0]) == ["sin"]
    x = torch.rand(4, 4)
    _, y_value, target_value = stitched(x)
    assert torch.equal(y_value, x.sin().t()) and torch.equal(target_value, y_value)
    assert target_value.untyped_storage().data_ptr() == y_value.untyped_storage().data_ptr()


def test_a_view_made_under_no_grad_is_made_again_under_no_grad() -> None:
    build = GraphBuilder()
    h = build.call(torch.sin, build.input("x"))
    build.call(torch._C._set_grad_enabled, False)
    flat = build.call("view", h, -1)
    build.call(torch._C._set_grad_enabled, True)
    y = build.call(torch.cos, h)
    gm = build.output(build.call(torch.mul, y, 2), build.call(torch.exp, flat))
    stitched = partition_graph(gm, [find(gm, "cos"), find(gm, "exp")])
    *_, last = partitions_of(stitched)
    assert inputs(last) == ["sin"]
    assert [node.args for node in last.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)] == [
        (False,),
        (True,),
    ]
    x = torch.rand(4, 4, requires_grad=True)
    stitched(x)[1].sum().backward()
    assert x.grad is None


def test_what_computes_writes_or_has_a_hook_is_not_made_again() -> None:
    build = GraphBuilder()
    h = build.call(torch.sin, build.input("x", torch.ones(4, 4, requires_grad=True)))
    reached = build.call("as_strided", h, (2,), (1,))
    doubled = build.call("mul_", h, 2)
    watched = build.call("view", h, -1)
    build.call("register_hook", watched, build.input("hook", torch.neg))
    trees = trees_of(build.output(reached, doubled, watched, build.call("t", h)))
    assert [trees.root(node) for node in (reached, doubled, watched)] == [reached, doubled, watched]


def user_function(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1)


def test_what_a_function_of_the_users_returns_of_its_argument_does_not_cross() -> None:
    build = GraphBuilder()
    h = build.call(torch.sin, build.input("x"))
    own = build.call(user_function, h)
    build.call(torch.cos, h)
    gm = build.output(build.call(torch.exp, own))
    (held,) = (h for h in find_held_cuts(gm) if "user_function" in h.reason)
    assert (held.first, held.last) == (find(gm, "user_function") + 1, find(gm, "exp"))
    assert held.reason == "user_function shares the memory of sin and cannot be made again as a view of it"


def test_what_a_function_of_the_users_returns_of_its_argument_stays_with_it_if_the_caller_gets_it() -> None:
    build = GraphBuilder()
    h = build.call(torch.sin, build.input("x"))
    y = build.call(torch.cos, h)
    gm = build.output(build.call(user_function, h), y)
    assert {(h.first, h.last) for h in find_held_cuts(gm)} == {(find(gm, "sin") + 1, len(gm.graph.nodes) - 1)}


def test_views_that_can_be_made_again_hold_no_cut() -> None:
    build = GraphBuilder()
    h = build.call(torch.sin, build.input("x"))
    views = [build.call(name, h) for name in ("t", "detach", "contiguous")]
    for view in views:
        h = build.call(torch.add, h, build.call(torch.cos, view))
    assert find_held_cuts(build.output(h, *views)) == []
