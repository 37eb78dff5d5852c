"""Choosing cuts: one partition for each bucket; a cut moves, or is given up, if the graph must stay whole there."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import calls, chain, context, partitions_of, record
from torch import fx

from ddp_compile.passes.forward.split_forward import split_forward_pass
from ddp_compile.passes.pipeline import Declined, PassResult


def partitions(gm: fx.GraphModule) -> list[list[str]]:
    """Names of the calls in each partition."""
    return list(map(calls, partitions_of(gm)))


def split(function: Callable[..., Any], *buckets: list[int], every_cut_or_none: bool = False) -> PassResult:
    gm, parameter_of = record(function)
    ctx = dataclasses.replace(context(parameter_of, *buckets), every_cut_or_none=every_cut_or_none)
    result = split_forward_pass(gm, ctx)
    assert (result.gm is gm) == (result.num_changed == 0)
    return result


EACH = [["matmul", "tanh"], ["matmul_1", "tanh_1"], ["matmul_2", "tanh_2"]]


@pytest.mark.parametrize(
    ("num_layers", "buckets", "expected"),
    [
        (3, ([2], [1], [0]), EACH),
        (3, ([0], [2], [1]), EACH),  # the order of buckets in the plan does not move the cuts
        (4, ([3, 2], [1, 0]), [sum(EACH[:2], []), ["matmul_2", "tanh_2", "matmul_3", "tanh_3"]]),  # noqa: RUF017
        (2, ([9, 1], [0, 8]), EACH[:2]),  # parameters 8 and 9 are in other graphs
    ],
)
def test_partition_for_each_bucket(num_layers: int, buckets: Any, expected: list[list[str]]) -> None:
    gm, parameter_of = chain(num_layers)
    result = split_forward_pass(gm, context(parameter_of, *buckets))
    assert partitions(result.gm) == expected
    assert result.num_changed == len(expected) and result.declined == ()


@pytest.mark.parametrize("members", [[], [[0, 1]], [[7, 0, 1]], [[0, 1], [5]]])
def test_one_bucket_is_not_cut(members: list[list[int]]) -> None:
    gm, parameter_of = chain(2)
    result = split_forward_pass(gm, context(parameter_of, *members))
    assert result.gm is gm and result.num_changed == 0 and result.declined == ()


def test_reads_without_gradients_count() -> None:
    """Its gradient would wait for the backward of the partition that reads it, as with spectral normalization."""

    def function(x: Any, p0: Any, p1: Any, p2: Any) -> Any:
        x = torch.matmul(x, p0)
        with torch.no_grad():
            norm = torch.sum(p2)
        return torch.matmul(torch.mul(torch.matmul(x, p1), norm), p2)

    split_up = partitions(split(function, [2], [1], [0]).gm)
    assert split_up == [["matmul"], ["sum_1"], ["matmul_1", "mul", "matmul_2"]]


def held_once(x: Any, p0: Any, p1: Any) -> Any:
    """A tuple lives from before the second parameter's use to after it."""
    x = torch.matmul(x, p0)
    y = torch.sin(x)
    pair = x.chunk(1)
    return torch.add(torch.matmul(y, p1), pair[0])


def held_twice(x: Any, p0: Any, p1: Any, p2: Any) -> Any:
    x = torch.matmul(x, p0)
    pair = x.chunk(1)
    return torch.add(torch.matmul(torch.matmul(x, p1), p2), pair[0])


TUPLE = "chunk, a tuple, cannot cross partitions"
TOGETHER = f"bucket 0 is launched with bucket 1: {TUPLE}"


@pytest.mark.parametrize(
    ("function", "expected", "declined"),
    [
        (
            held_once,
            [["matmul", "sin"], ["chunk", "matmul_1", "getitem", "add"]],
            [("matmul_1", f"cut moved up to chunk: {TUPLE}")],
        ),
        (
            held_twice,
            [["matmul"], ["chunk", "matmul_1", "matmul_2", "getitem", "add"]],
            [("matmul_2", TOGETHER), ("matmul_1", f"cut moved up to chunk: {TUPLE}")],
        ),
    ],
)
def test_held_cuts_move_up(
    function: Callable[..., Any], expected: list[list[str]], declined: list[tuple[str, str]]
) -> None:
    buckets = [[2], [1], [0]] if function is held_twice else [[1], [0]]
    result = split(function, *buckets)
    assert partitions(result.gm) == expected and result.num_changed == len(expected)
    assert [(each.node, each.reason) for each in result.declined] == declined
    assert all(f"bucket {each.bucket} " in each.reason or "moved" in each.reason for each in result.declined)


def test_every_cut_or_none() -> None:
    # A cut that moves still lets its bucket be launched before the next.
    assert len(partitions(split(held_once, [1], [0], every_cut_or_none=True).gm)) == 2
    result = split(held_twice, [2], [1], [0], every_cut_or_none=True)
    assert result.num_changed == 0 and Declined("matmul_2", TOGETHER, 0) in result.declined


def test_every_cut_or_none_within_an_operator() -> None:
    def function(x: Any, p0: Any, p1: Any, p2: Any) -> Any:
        return torch.matmul(torch.addmm(p0, x, p1), p2)

    assert partitions(split(function, [2], [1], [0], every_cut_or_none=True).gm) == [["addmm"], ["matmul"]]
