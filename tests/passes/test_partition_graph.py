"""Cutting a graph: the partitions compute the same as the whole graph wherever it is cut; which values cross a cut."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import GraphBuilder, calls, capture, context, find, names, partitions_of, record
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from ddp_compile.passes.analysis.cut_constraints import find_held_cuts, mode_regions
from ddp_compile.passes.analysis.views import ViewTrees
from ddp_compile.passes.forward.partition_graph import partition_graph
from ddp_compile.passes.forward.unpack_sizes import unpack_sizes_pass


def allowed_cuts(gm: fx.GraphModule) -> list[int]:
    """Every position at which some call comes before and some after, and which is not held."""
    nodes = list(gm.graph.nodes)
    held = {at for interval in find_held_cuts(gm) for at in range(interval.first, interval.last + 1)}
    calls = [i for i, node in enumerate(nodes) if node.op.startswith("call")]
    return [at for at in range(calls[0] + 1, calls[-1] + 1) if at not in held]


def sizes_as_numbers(inputs: list[Any]) -> list[Any]:
    """A captured graph has the symbols of its sizes among its inputs."""
    return [value.node.hint if isinstance(value, torch.SymInt) else value for value in inputs]


def assert_computes_the_same(gm: fx.GraphModule, stitched: fx.GraphModule, inputs: list[Any]) -> None:
    stitched.graph.lint()
    for partition in partitions_of(stitched):
        partition.graph.lint()
    inputs = sizes_as_numbers(inputs)
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


def test_numbers_are_copied() -> None:
    def function(call: Any, x: Any) -> Any:
        size, dtype = x.size(0), call(getattr, x, "dtype")
        return size, torch.mul(torch.sin(x), size).to(dtype=dtype)

    gm, _ = record(function)
    stitched = partition_graph(gm, [find(gm, "mul")])
    first, second = partitions_of(stitched)
    assert names(first.graph.output_node().all_input_nodes) == ["sin"]
    assert names(second.graph.find_nodes(op="placeholder")) == ["sin"]
    mul, to = (node for node in second.graph.nodes if node.op.startswith("call"))
    assert mul.args[1] == 4 and to.kwargs == {"dtype": torch.float32}
    assert stitched.graph.output_node().args[0][0] == 4


def test_attributes_go_to_each_partition() -> None:
    build = GraphBuilder()
    x, weight = build.input("x"), build.parameter(0, "weight")
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
        mentioned = {str(s) for size in sizes if not isinstance(size, int) for s in size.node.expr.free_symbols}
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
    gm, _ = record(function)
    first, second = partitions_of(partition_graph(gm, [find(gm, "cos")]))
    assert names(first.graph.output_node().all_input_nodes) == crossing and calls(second) == second_calls
    assert [name for name in names(second.graph.find_nodes(op="placeholder")) if name != "p0"] == crossing


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


def uses_sizes(x: Tensor) -> Tensor:
    rows, columns = x.size()
    y = x.sin().reshape(rows * columns).cos()
    return y.view(x.size()) * rows


def test_symbolic_sizes_are_unpacked() -> None:
    gm, inputs = capture(uses_sizes, torch.rand(6, 4), dynamic=True)
    inputs = sizes_as_numbers(inputs)
    (expected,) = gm(*inputs)
    held = [interval for interval in find_held_cuts(gm) if "Size" in interval.reason]
    gm, num_changed, _ = unpack_sizes_pass(gm, context({}))
    gm.graph.lint()
    gm.recompile()
    sizes = [node for node in gm.graph.nodes if node.target == "size"]
    assert held and num_changed
    assert all(len(node.args) == 2 for node in sizes)
    assert not any("Size" in interval.reason for interval in find_held_cuts(gm))
    assert torch.equal(gm(*inputs)[0], expected)
