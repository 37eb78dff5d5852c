"""Choosing cuts: one partition for each bucket, moved or given up where the graph must stay whole."""

from __future__ import annotations

import dataclasses
import operator

import pytest
import torch
from graphs import GraphBuilder, chain, context
from torch import fx

from ddp_compile.passes.forward.split_forward import split_forward_pass
from ddp_compile.passes.pipeline import Declined


def partitions(gm: fx.GraphModule) -> list[list[str]]:
    """Names of the calls in each partition."""
    return [
        [node.name for node in gm.get_submodule(call.target).graph.nodes if node.op.startswith("call")]
        for call in gm.graph.find_nodes(op="call_module")
    ]


def test_each_bucket_gets_a_partition() -> None:
    gm, parameter_of = chain(3)
    result = split_forward_pass(gm, context(parameter_of, [2], [1], [0]))
    assert partitions(result.gm) == [["matmul", "tanh"], ["matmul_1", "tanh_1"], ["matmul_2", "tanh_2"]]
    assert result.num_changed == 3 and result.declined == ()


def test_a_bucket_of_several_parameters_starts_at_the_first_one_used() -> None:
    gm, parameter_of = chain(4)
    result = split_forward_pass(gm, context(parameter_of, [3, 2], [1, 0]))
    assert partitions(result.gm) == [
        ["matmul", "tanh", "matmul_1", "tanh_1"],
        ["matmul_2", "tanh_2", "matmul_3", "tanh_3"],
    ]


def test_parameters_of_a_bucket_that_other_graphs_hold_do_not_count() -> None:
    gm, parameter_of = chain(2)
    result = split_forward_pass(gm, context(parameter_of, [9, 1], [0, 8]))
    assert partitions(result.gm) == [["matmul", "tanh"], ["matmul_1", "tanh_1"]]


@pytest.mark.parametrize("members", [[], [[0, 1]], [[7, 0, 1]], [[0, 1], [5]]])
def test_fewer_than_two_buckets_leave_the_graph_as_it_is(members: list[list[int]]) -> None:
    gm, parameter_of = chain(2)
    result = split_forward_pass(gm, context(parameter_of, *members))
    assert result.gm is gm and result.num_changed == 0 and result.declined == ()


def test_the_order_of_buckets_in_the_plan_does_not_move_the_cuts() -> None:
    gm, parameter_of = chain(3)
    result = split_forward_pass(gm, context(parameter_of, [0], [2], [1]))
    assert partitions(result.gm) == [["matmul", "tanh"], ["matmul_1", "tanh_1"], ["matmul_2", "tanh_2"]]


def test_work_before_the_first_parameter_goes_with_the_last_bucket() -> None:
    build = GraphBuilder()
    x = build.call(torch.sin, build.input("x"))
    for i in range(2):
        x = build.call(torch.matmul, x, build.parameter(i))
    result = split_forward_pass(build.output(x), context(build.parameter_of, [1], [0]))
    assert partitions(result.gm) == [["sin", "matmul"], ["matmul_1"]]


def test_two_buckets_that_meet_in_one_node_leave_together() -> None:
    build = GraphBuilder()
    x = build.input("x")
    y = build.call(torch.addmm, build.parameter(0), x, build.parameter(1))
    gm = build.output(build.call(torch.sin, y))
    result = split_forward_pass(gm, context(build.parameter_of, [1], [0]))
    assert result.gm is gm and result.num_changed == 0
    assert result.declined == (
        Declined("addmm", "bucket 0 is launched with bucket 1: one node computes with gradients of both"),
    )


def test_a_parameter_used_again_early_lets_its_bucket_leave_with_the_early_one() -> None:
    build = GraphBuilder()
    x = build.input("x")
    shared, middle, last = (build.parameter(i) for i in range(3))
    for weight in (shared, middle, last, shared):
        x = build.call(torch.matmul, x, weight)
    result = split_forward_pass(build.output(x), context(build.parameter_of, [2], [1], [0]))
    assert partitions(result.gm) == [["matmul"], ["matmul_1"], ["matmul_2", "matmul_3"]]


def held_chain() -> tuple[fx.GraphModule, dict[str, int]]:
    """A tuple lives from before the second parameter's use to after it."""
    build = GraphBuilder()
    x, first, second = build.input("x"), build.parameter(0), build.parameter(1)
    x = build.call(torch.matmul, x, first)
    y = build.call(torch.sin, x)
    pair = build.call("chunk", x, 1)
    z = build.call(torch.matmul, y, second)
    z = build.call(torch.add, z, build.call(operator.getitem, pair, 0))
    return build.output(z), build.parameter_of


def test_a_cut_that_is_held_moves_to_the_nearest_earlier_place_and_says_so() -> None:
    gm, parameter_of = held_chain()
    result = split_forward_pass(gm, context(parameter_of, [1], [0]))
    assert partitions(result.gm) == [["matmul", "sin"], ["chunk", "matmul_1", "getitem", "add"]]
    assert result.declined == (Declined("matmul_1", "cut moved up to chunk: chunk, a tuple, cannot cross partitions"),)


def test_a_cut_that_would_have_to_move_past_the_next_bucket_is_not_made_and_says_so() -> None:
    build = GraphBuilder()
    x = build.input("x")
    pair = build.call("chunk", x, 1)
    y = build.call(torch.matmul, x, build.parameter(0))
    y = build.call(torch.matmul, y, build.parameter(1))
    y = build.call(torch.add, y, build.call(operator.getitem, pair, 0))
    gm = build.output(y)
    result = split_forward_pass(gm, context(build.parameter_of, [1], [0]))
    assert result.gm is gm and result.num_changed == 0
    assert result.declined == (
        Declined("matmul_1", "bucket 0 is launched with bucket 1: chunk, a tuple, cannot cross partitions"),
    )


def test_reasons_that_hold_one_after_the_other_are_all_named() -> None:
    build = GraphBuilder()
    x, first, second = build.input("x"), build.parameter(0), build.parameter(1)
    x = build.call(torch.matmul, x, first)
    x = build.call(torch.sin, x)
    outer = build.call("chunk", x, 1)
    x = build.call(torch.cos, build.call(operator.getitem, outer, 0))
    inner = build.call("split", x, 4)
    again = build.call(operator.getitem, outer, 0)
    y = build.call(torch.matmul, x, second)
    y = build.call(torch.add, y, again)
    y = build.call(torch.add, y, build.call(operator.getitem, inner, 0))
    result = split_forward_pass(build.output(y), context(build.parameter_of, [1], [0]))
    assert partitions(result.gm)[0] == ["matmul", "sin"]
    (declined,) = result.declined
    assert declined.node == "matmul_1"
    assert declined.reason == (
        "cut moved up to chunk: split, a tuple, cannot cross partitions; chunk, a tuple, cannot cross partitions"
    )


def test_two_cuts_that_move_to_one_place_make_one_cut() -> None:
    build = GraphBuilder()
    x, *weights = build.input("x"), *(build.parameter(i) for i in range(3))
    x = build.call(torch.matmul, x, weights[0])
    pair = build.call("chunk", x, 1)
    y = build.call(torch.matmul, x, weights[1])
    y = build.call(torch.matmul, y, weights[2])
    y = build.call(torch.add, y, build.call(operator.getitem, pair, 0))
    result = split_forward_pass(build.output(y), context(build.parameter_of, [2], [1], [0]))
    assert partitions(result.gm) == [["matmul"], ["chunk", "matmul_1", "matmul_2", "getitem", "add"]]
    assert result.num_changed == 2
    assert [d.reason for d in result.declined] == [
        "bucket 0 is launched with bucket 1: chunk, a tuple, cannot cross partitions",
        "cut moved up to chunk: chunk, a tuple, cannot cross partitions",
    ]


def test_with_every_cut_or_none_a_graph_with_all_of_them_is_cut() -> None:
    gm, parameter_of = held_chain()  # one is moved, and still lets its bucket be launched before the next
    result = split_forward_pass(gm, dataclasses.replace(context(parameter_of, [1], [0]), every_cut_or_none=True))
    assert len(partitions(result.gm)) == 2


def test_with_every_cut_or_none_a_graph_that_misses_one_stays_whole_and_says_why() -> None:
    build = GraphBuilder()
    x = build.call(torch.matmul, build.input("x"), build.parameter(0))
    pair = build.call("chunk", x, 1)
    for i in (1, 2):
        x = build.call(torch.matmul, x, build.parameter(i))
    gm = build.output(build.call(torch.add, x, build.call(operator.getitem, pair, 0)))
    ctx = context(build.parameter_of, [2], [1], [0])
    result = split_forward_pass(gm, dataclasses.replace(ctx, every_cut_or_none=True))
    assert result.gm is gm and result.num_changed == 0
    note = "bucket 0 is launched with bucket 1: chunk, a tuple, cannot cross partitions"
    assert Declined("matmul_2", note) in result.declined
    assert len(partitions(split_forward_pass(gm, ctx).gm)) == 2


def test_every_cut_or_none_asks_for_none_within_an_operator() -> None:
    build = GraphBuilder()
    x = build.call(torch.addmm, build.parameter(0), build.input("x"), build.parameter(1))
    x = build.call(torch.matmul, x, build.parameter(2))
    ctx = context(build.parameter_of, [2], [1], [0])
    result = split_forward_pass(build.output(x), dataclasses.replace(ctx, every_cut_or_none=True))
    assert partitions(result.gm) == [["addmm"], ["matmul"]]
