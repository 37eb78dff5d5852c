"""Cutting a graph: together the partitions compute the same as the whole graph, wherever it is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import GraphBuilder, capture, find, record
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from ddp_compile.passes.analysis.cut_constraints import find_held_cuts
from ddp_compile.passes.forward.partition_graph import partition_graph


def allowed_cuts(gm: fx.GraphModule) -> list[int]:
    """Every position at which some call comes before and some after, and which is not held."""
    nodes = list(gm.graph.nodes)
    held = {at for interval in find_held_cuts(gm) for at in range(interval.first, interval.last + 1)}
    calls = [i for i, node in enumerate(nodes) if node.op.startswith("call")]
    return [at for at in range(calls[0] + 1, calls[-1] + 1) if at not in held]


def partitions_of(stitched: fx.GraphModule) -> list[fx.GraphModule]:
    return [stitched.get_submodule(node.target) for node in stitched.graph.find_nodes(op="call_module")]


def names(nodes: Any) -> list[str]:
    return [node.name for node in nodes]


def calls(gm: fx.GraphModule) -> list[str]:
    return [getattr(n.target, "__name__", n.target) for n in gm.graph.nodes if n.op.startswith("call")]


def assert_computes_the_same(gm: fx.GraphModule, stitched: fx.GraphModule, inputs: list[Any]) -> None:
    stitched.graph.lint()
    for partition in partitions_of(stitched):
        partition.graph.lint()
    # A captured graph still has the symbols of its sizes among its inputs.
    inputs = [value.node.hint if isinstance(value, torch.SymInt) else value for value in inputs]
    torch.testing.assert_close(stitched(*inputs), gm(*inputs), rtol=0, atol=0)


def with_checkpoint(x: Tensor) -> Tensor:
    x = checkpoint(lambda y: y.sin().cos(), x.exp(), use_reentrant=False)
    return checkpoint(lambda y: y.tan(), x, use_reentrant=False) * 2


def with_condition(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x.exp(),)).tan()


def with_nested_autocast(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = (x @ x).sin()
        with torch.autocast("cpu", enabled=False):
            y = (x.float() @ x.float()).cos()
        x = x @ x
    return x @ x, y


def with_structure(x: Tensor) -> dict[str, Any]:
    y = x.sin()
    return {"y": y, "none": None, "constant": 3, "z": [y.cos(), x, y], "last": slice(0, 2)}


def with_constants(x: Tensor) -> Tensor:
    table = torch.tensor([1.0, 2.0, 3.0])
    return (x.sin() + table).cos() + table * x.dim() + x.size(0)


CASES: dict[str, Callable[..., Any]] = {
    "chain": lambda x: (x.sin() + 1).cos() * x,
    "kept_value": lambda x: (x.sin() * x.sin().cos() + x.exp()).tan() + x,
    "checkpoint": with_checkpoint,
    "condition": with_condition,
    "nested_autocast": with_nested_autocast,
    "structure": with_structure,
    "constants": with_constants,
}


#: What is held beyond need would be launched late.
NUM_CUTS = {
    **{"chain": 3, "kept_value": 7, "checkpoint": 5, "condition": 6, "nested_autocast": 11},
    **{"structure": 1, "constants": 6},
}


@pytest.mark.parametrize("name", CASES)
def test_every_allowed_cut_computes_the_same(name: str) -> None:
    x = torch.rand(3, 3)
    gm, inputs = capture(CASES[name], x)
    before, cuts = str(gm.graph), allowed_cuts(gm)
    assert len(cuts) == NUM_CUTS[name]
    for positions in (*([at] for at in cuts), cuts):
        stitched = partition_graph(gm, positions)
        assert names(stitched.graph.find_nodes(op="call_module")) == [
            f"partition_{i}" for i in range(len(positions) + 1)
        ]
        assert_computes_the_same(gm, stitched, inputs)
        assert not torch.is_autocast_enabled("cpu")
    assert str(gm.graph) == before


def kept(x: Any, unused: Any) -> Any:
    h = torch.sin(x)
    result = torch.tan(torch.cos(h))
    return torch.exp(h), result


def with_sizes(call: Any, x: Any) -> Any:
    size, dtype = x.size(0), call(getattr, x, "dtype")
    return size, torch.mul(torch.sin(x), size).to(dtype=dtype)


@pytest.mark.parametrize(
    ("function", "before", "given", "taken"),
    # A partition returns exactly the values that are needed later; numbers are copied into the graphs that use them.
    [(kept, "exp", ["sin", "tan"], ["sin"]), (with_sizes, "mul", ["sin"], ["sin"])],
)
def test_partition_inputs_and_outputs(
    function: Callable[..., Any], before: str, given: list[str], taken: list[str]
) -> None:
    gm, _ = record(function)
    stitched = partition_graph(gm, [find(gm, before)])
    first, second = partitions_of(stitched)
    assert names(first.graph.output_node().all_input_nodes) == given
    assert names(second.graph.find_nodes(op="placeholder")) == taken
    # Inputs that nothing uses stay.
    placeholders = names(gm.graph.find_nodes(op="placeholder"))
    assert names(stitched.graph.find_nodes(op="placeholder")) == placeholders
    assert_computes_the_same(gm, stitched, [torch.rand(4, 4) for _ in placeholders])
    if function is with_sizes:
        mul, to = (node for node in second.graph.nodes if node.op.startswith("call"))
        assert mul.args[1] == 4 and to.kwargs == {"dtype": torch.float32}
        assert stitched.graph.output_node().args[0][0] == 4


def test_attributes_go_to_each_partition() -> None:
    build = GraphBuilder()
    x, weight = build.input("x"), build.parameter(0, "weight", get_attr=True)
    y = build.call(torch.matmul, build.call(torch.matmul, x, weight), weight)
    gm = build.output(x, weight, y)
    stitched = partition_graph(gm, [find(gm, "matmul", 1)])
    assert [partition.weight is gm.weight for partition in partitions_of(stitched)] == [True, True]
    assert [names(p.graph.find_nodes(op="placeholder")) for p in partitions_of(stitched)] == [["x"], ["matmul"]]
    x_value = torch.rand(4, 4)
    assert_computes_the_same(gm, stitched, [x_value])
    assert stitched(x_value)[0] is x_value and stitched(x_value)[1] is gm.weight


def concatenated(x: Tensor, y: Tensor) -> Tensor:
    """The last partition takes a tensor whose rows are the sum of two symbols."""
    x = x.sin()
    x = torch.cat([x, y]).cos()
    return x.tan() * 2


def halved(x: Tensor, y: Tensor) -> Tensor:
    """An expression of a symbol crosses."""
    half = x.shape[0] // 2
    z = x.sum().cos()
    return (z * 2).tan().expand(half) * y.sum()


@pytest.mark.parametrize("function", [concatenated, halved])
def test_symbols_of_partition_inputs(function: Callable[..., Tensor]) -> None:
    gm, inputs = capture(function, torch.rand(6, 2), torch.rand(5, 2), dynamic=True)
    stitched = partition_graph(gm, [find(gm, "cos"), find(gm, "tan")])
    for partition in partitions_of(stitched):
        examples = [node.meta["example_value"] for node in partition.graph.find_nodes(op="placeholder")]
        kinds = [isinstance(example, torch.SymInt) for example in examples]
        assert kinds == sorted(kinds, reverse=True), "a symbolic size after a tensor"
        sizes = [size for e in examples for size in (e.shape if isinstance(e, Tensor) else [e])]
        mentioned = {
            str(symbol) for size in sizes if not isinstance(size, int) for symbol in size.node.expr.free_symbols
        }
        assert mentioned <= {str(example) for example in examples if isinstance(example, torch.SymInt)}
    assert mentioned
    assert_computes_the_same(gm, stitched, inputs)


def test_placeholders_keep_their_sources() -> None:
    gm, _ = capture(lambda x: x.sin().cos() * x, torch.rand(3))
    stitched = partition_graph(gm, [find(gm, "cos")])
    (whole,) = gm.graph.find_nodes(op="placeholder")
    first, second = partitions_of(stitched)
    sources = [[n._dynamo_source for n in p.graph.find_nodes(op="placeholder")] for p in (first, second)]
    assert sources == [[whole._dynamo_source], [None, whole._dynamo_source]]
