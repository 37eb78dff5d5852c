"""Operators inside a backward graph that report complete buckets."""

import operator
from dataclasses import replace

import pytest
import torch
from backward_graphs import BackwardBuilder, aten, bucket_ready, calls, context
from torch import fx

from ddp_compile.passes.backward.bucket_backward import bucket_backward_pass


def ready_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=bucket_ready)


def outputs(gm: fx.GraphModule) -> list[str | None]:
    return [None if node is None else node.name for node in gm.graph.output_node().args[0]]


def chain_of_layers(build: BackwardBuilder, num_layers: int) -> list[fx.Node]:
    """Gradients of the weights of ``x @ w0 @ w1 ...``, the last layer's first."""
    saved = [build.input(f"saved_{i}") for i in range(num_layers)]
    gradient = build.input("tangent")
    gradients = []
    for value in saved:
        gradients.append(build.call(aten.mm.default, value, gradient))
        gradient = build.call(aten.mm.default, gradient, value)
    return gradients


def test_ready_after_last_gradient() -> None:
    build = BackwardBuilder()
    gradients = chain_of_layers(build, 4)
    gm = build.output(*reversed(gradients))
    gm, num_changed, declined = bucket_backward_pass(gm, context([3, 2], [1, 0]))
    assert (num_changed, declined) == (2, ())
    # mm_1 is needed by mm_2, mm_3 by the second bucket only.
    assert calls(gm) == ["mm", "mm_1", "mm_2", "ready [3, 2]", "mm_3", "mm_4", "mm_5", "mm_6", "ready [1, 0]", "mm_7"]
    gm.graph.lint()


def test_held_values() -> None:
    build = BackwardBuilder()
    gradients = chain_of_layers(build, 4)
    gm, _, _ = bucket_backward_pass(build.output(*reversed(gradients)), context([3], [2], [1], [0]))
    # The tangent of each layer; of the first of them, which is an input, nothing is to be held.
    assert [[held.name for held in node.args[3]] for node in ready_nodes(gm)] == [[], ["mm_1"], ["mm_3"], ["mm_5"]]


def test_buckets_with_one_last_node() -> None:
    build = BackwardBuilder()
    tangent = build.input("tangent")
    last = build.call(aten.split.Tensor, tangent, 2)
    halves = [build.call(operator.getitem, last, i) for i in range(2)]
    gm = build.output(*halves, build.call(aten.mm.default, tangent, tangent))
    gm, _, _ = bucket_backward_pass(gm, context([1], [0]))
    assert [node.args[2] for node in ready_nodes(gm)] == [[1], [0]]


@pytest.mark.parametrize(
    ("buckets", "of", "is_sparse", "reasons"),
    [
        ([[1], [0, 2]], [0, 1, 2], False, ["bucket 1 has parameters without a gradient here: p2"]),
        ([[0, 9]], [0, None, None], False, ["bucket 0 waits for gradients from elsewhere: p9"]),
        ([[0]], [0, 1, 2], True, ["bucket 0 is sparse"]),
        # A gradient that is said to be of another input is not believed.
        ([[0, 1]], [1, 0, None], False, ["bucket 0 waits for gradients from elsewhere: p0, p1"]),
        ([[0, 1]], [None, None, None], False, ["bucket 0 waits for gradients from elsewhere: p0, p1"]),
    ],
)
def test_incomplete_buckets_are_declined(
    buckets: list[list[int]], of: list[int | None], is_sparse: bool, reasons: list[str]
) -> None:
    build = BackwardBuilder()
    first, second = chain_of_layers(build, 2)
    ctx = context(*buckets)
    specs = [replace(b, gradients=tuple(replace(g, is_sparse=is_sparse) for g in b.gradients)) for b in ctx.buckets]
    gm = build.output(second, first, None, of=of)
    gm, num_changed, declined = bucket_backward_pass(gm, replace(ctx, buckets=tuple(specs)))
    assert num_changed == len(buckets) - 1
    assert [entry.reason for entry in declined] == reasons


def test_clones_what_autograd_would_clone() -> None:
    build = BackwardBuilder()
    tangent = build.input("tangent")
    shared = build.call(aten.mm.default, tangent, tangent)
    expanded = build.call(aten.expand.default, build.call(aten.sum.default, tangent), [4, 4])
    view_of_input = build.call(aten.t.default, tangent)
    own_view = build.call(aten.t.default, build.call(aten.mm.default, tangent, tangent))
    of_input = build.call(aten.mm.default, tangent, tangent)
    gm = build.output(tangent, shared, shared, expanded, view_of_input, own_view, of_input)
    gm, _, _ = bucket_backward_pass(gm, context([0, 1, 2, 3, 4, 5]))
    names = ["clone_default", "clone_default_1", "mm", "clone_default_2", "clone_default_3", "t_1"]
    assert outputs(gm) == [*names, "mm_2"]
    (node,) = ready_nodes(gm)
    assert [argument.name for argument in node.args[0]] == names
    values = [argument.meta["val"] for argument in node.args[0]]
    assert all(value.stride() in ((4, 1), (1, 4)) for value in values)
    gm.graph.lint()
    # Nothing that the operator is given shares memory with another or with an input.
    storages = {value.untyped_storage()._cdata for value in values}
    assert len(storages) == len(values) and tangent.meta["val"].untyped_storage()._cdata not in storages


def test_buckets_ready_at_the_end_are_declined() -> None:
    build = BackwardBuilder()
    saved, tangent = build.input("saved"), build.input("tangent")
    first = build.call(aten.mm.default, saved, tangent)
    both = build.call(aten.var_mean.correction, tangent, [0])
    variance, mean = (build.call(operator.getitem, both, i) for i in range(2))
    gm = build.output(first, build.call(aten.unsqueeze.default, variance, 0), mean)
    gm, num_changed, declined = bucket_backward_pass(gm, context([0], [1], [2]))
    assert (num_changed, [node.args[2] for node in ready_nodes(gm)]) == (1, [[0]])
    assert [entry.reason for entry in declined] == [f"bucket {i} is ready when the graph ends" for i in (1, 2)]


def test_moved_gradients() -> None:
    build = BackwardBuilder()
    gradients = chain_of_layers(build, 4)
    tangent = build.graph.find_nodes(op="placeholder")[-1]
    gm = build.output(*reversed(gradients), tangent)
    # Parameter 1 has none of the strides that a place in a flat buffer can have.
    ctx = replace(context([3, 4], [2], [1]), strides={4: (4, 1), 3: (1, 4), 2: (4, 1)})
    gm, num_changed, _ = bucket_backward_pass(gm, ctx)
    assert num_changed == 3
    first, second = gm.graph.find_nodes(op="call_function", target=torch.ops.ddp_compile.move_bucket.default)
    # A tangent that is passed on needs no clone then.
    assert first.args == ([gradients[0], tangent], [1, 4, 4, 1], 7, [3, 4])
    assert second.args == ([gradients[1]], [4, 1], 7, [2])
    # Of the first bucket's tangent, which is an input, nothing is to be held.
    (hold,) = gm.graph.find_nodes(op="call_function", target=torch.ops.ddp_compile.hold_back.default)
    assert hold.args[0] == [gm.graph.output_node().args[0][2]] and [held.name for held in hold.args[1]] == ["mm_1"]
    assert [node.args[2] for node in ready_nodes(gm)] == [[1]]
    returned = gm.graph.output_node().args[0]
    assert [node.args for node in (returned[3], returned[4], returned[2])] == [(first, 0), (first, 1), (second, 0)]
    assert returned[3].meta["val"].stride() == (1, 4)
    assert returned[1] is gradients[2]
    gm.graph.lint()
