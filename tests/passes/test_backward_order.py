"""The order in which a backward graph computes the gradients of its buckets."""

from __future__ import annotations

import operator

from backward_graphs import BackwardBuilder, aten
from torch import fx

from ddp_compile.passes.backward.backward_order import Moved, base_of, bring_forward


def names(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "call_function"]


def test_moves_what_only_later_buckets_need() -> None:
    build = BackwardBuilder()
    saved, tangent = build.input("saved"), build.input("tangent")
    passed_on = build.call(aten.mm.default, tangent, saved)
    first = build.call(aten.mm.default, saved, tangent)
    second = build.call(aten.mm.default, saved, passed_on)
    build.output(first, second)
    assert bring_forward(build.graph, [[first], [second]]) == [Moved(2, 1), Moved(3, 3)]
    assert names(build.graph) == ["mm_1", "mm", "mm_2"]
    build.graph.lint()


def test_peak_memory_does_not_grow() -> None:
    build = BackwardBuilder()
    tangent = build.input("tangent", 400, 400)
    large = build.call(aten.exp.default, tangent)
    first_part = build.call(aten.sum.dim_IntList, large, [0])
    second = build.call(aten.sum.dim_IntList, large, [1])
    other = build.call(aten.sin.default, first_part)
    wide = build.call(aten.mul.Tensor, other, tangent)
    first = build.call(aten.sum.dim_IntList, wide, [0])
    build.output(first, second)
    order = names(build.graph)
    # Without "second" before it, "large" would still be there when "wide" is made.
    assert bring_forward(build.graph, [[first], [second]]) == [Moved(6, 6), Moved(3, 3)]
    assert names(build.graph) == order


def test_random_numbers_and_effects_do_not_move() -> None:
    for target, arguments in ((aten.rand_like.default, ()), (aten.add_.Tensor, (1,))):
        build = BackwardBuilder()
        saved, tangent = build.input("saved"), build.input("tangent")
        impure = build.call(target, tangent, *arguments)
        first = build.call(aten.mm.default, saved, saved)
        second = build.call(aten.mm.default, saved, impure)
        build.output(first, second)
        order = names(build.graph)
        bring_forward(build.graph, [[first], [second]])
        assert names(build.graph) == order


def test_base_of_views() -> None:
    build = BackwardBuilder()
    value = build.call(aten.mm.default, build.input("a"), build.input("b"))
    part = build.call(operator.getitem, build.call(aten.split.Tensor, build.call(aten.t.default, value), 2), 1)
    assert base_of(part) is value
    assert base_of(value) is value
    pair = build.call(aten.max.dim, value, 0)
    values = build.call(operator.getitem, pair, 0)
    assert base_of(values) is values
