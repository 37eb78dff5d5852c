"""Moves nodes of a backward graph to make buckets ready earlier."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ddp_compile import torch_internals
from ddp_compile.passes.analysis.aten_values import base_of
from ddp_compile.passes.analysis.graph_nodes import is_input


class Moved(NamedTuple):
    """Number of calls up to a bucket's last gradient, ``before`` and ``after`` moving nodes."""

    before: int
    after: int


def bring_forward(graph: fx.Graph, gradients: Sequence[Sequence[fx.Node]]) -> list[Moved]:
    """Move nodes that a bucket does not need after its last gradient, if that costs no memory.

    Otherwise nodes keep their order. A node that is computed later keeps its arguments in memory longer. So nodes move
    only if the graph's peak memory, by the sizes of the values, does not grow, and if none of them has effects or draws
    random numbers.

    Args:
        graph: A functional graph with ``meta["val"]`` on every node; its nodes are moved.
        gradients: The nodes of each bucket's gradients, in launch order.

    Returns:
        For each bucket, how early it becomes complete.
    """
    order = list(graph.nodes)
    num_inputs = sum(map(is_input, order))
    before = [_last_position(order, nodes) - num_inputs for nodes in gradients]
    memory = _Memory(order)
    peak = memory.peak(order)
    done = 0  # nodes before this position belong to earlier buckets
    for nodes in gradients:
        candidate = _with_needed_first(order, nodes, done)
        if candidate is not None and memory.peak(candidate) <= peak:
            order = candidate
        done = max(done, _last_position(order, nodes))
    _apply(graph, order)
    after = [_last_position(order, nodes) - num_inputs for nodes in gradients]
    return [Moved(*positions) for positions in zip(before, after, strict=True)]


def _last_position(order: Sequence[fx.Node], nodes: Iterable[fx.Node]) -> int:
    wanted = set(nodes)
    return max(i for i, node in enumerate(order) if node in wanted) + 1


def _with_needed_first(order: list[fx.Node], nodes: Iterable[fx.Node], done: int) -> list[fx.Node] | None:
    """An order in which, from ``done`` on, only nodes that ``nodes`` need come before them; None if nothing moves."""
    end = _last_position(order, nodes)
    needed: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    window = order[done:end]
    first = [node for node in window if node in needed or is_input(node)]
    later = [node for node in window if node not in needed and not is_input(node)]
    if not later or not all(map(_may_move, later)):
        return None
    return [*order[:done], *first, *later, *order[end:]]


def _may_move(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    return (
        isinstance(node.target, OpOverload)
        and not node.target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _apply(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    for node in reversed(order):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)


class _Memory:
    """The peak of the bytes that a graph's values take for an order of its nodes, without memory used inside a node.

    A value lives from its node to the last user of it or of a view; inputs live from the start, outputs to the end.
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._base = {node: base_of(node) for node in nodes}
        bases = set(self._base.values())
        self._num_bytes = {node: _num_bytes(node) if node in bases else 0 for node in nodes}

    def peak(self, order: Sequence[fx.Node]) -> int:
        last_use: dict[fx.Node, int] = {}
        for i, node in enumerate(order):
            last_use[self._base[node]] = i
            for argument in node.all_input_nodes:
                last_use[self._base[argument]] = i
        freed: dict[int, int] = {}
        for base, i in last_use.items():
            freed[i] = freed.get(i, 0) + self._num_bytes[base]
        live = sum(self._num_bytes[node] for node in order if node.op == "placeholder")
        highest = live
        for i, node in enumerate(order):
            if node.op != "placeholder":
                live += self._num_bytes[node]
                highest = max(highest, live)
            live -= freed.get(i, 0)
        return highest


def _num_bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    # If a node has several results, each counts at the getitem node that selects it.
    return torch_internals.num_bytes_hint(value) if isinstance(value, Tensor) and node.op != "output" else 0
