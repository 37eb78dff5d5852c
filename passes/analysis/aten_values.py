"""Questions about the values of AOTAutograd's graphs: what memory they are in, and which values depend on them."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload

from ddp_compile import torch_internals


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory a node is in: the base of a view, otherwise the node itself."""
    while True:
        view = node.args[0] if node.target is operator.getitem else node
        if not (isinstance(view, fx.Node) and isinstance(view.target, OpOverload) and view.target.is_view):
            return node
        source = view.args[0]
        assert isinstance(source, fx.Node)
        node = source


def is_dense_tensor(output: Any) -> bool:
    """Whether a node, or an argument of a graph's output, is one plain tensor."""
    value = output.meta.get("val") if isinstance(output, fx.Node) else None
    return isinstance(value, Tensor) and torch_internals.is_plain_tensor(value)


def value_to_hold(
    following: Sequence[fx.Node], position: Mapping[fx.Node, int], last: fx.Node, excluded: Iterable[fx.Node]
) -> list[fx.Node]:
    """Of the values computed up to ``last``, the one that most of the ``following`` nodes depend on, if there is one.

    An operator that is declared to write to it runs after it is computed and before those nodes, which are all from
    ``last`` to the next operator of ours, in order. Values that are ``excluded`` are not chosen.
    """
    not_these = {base_of(node) for node in excluded}
    bits: dict[fx.Node, int] = {}  # of each value computed up to `last`
    depends_on: dict[fx.Node, int] = {}
    num_dependents: dict[fx.Node, int] = {}
    for node in following:
        if node.op != "call_function":
            continue
        depends_on[node] = 0
        for argument in node.all_input_nodes:
            value = base_of(argument)
            if argument in depends_on:
                depends_on[node] |= depends_on[argument]
            elif (
                position[value] <= position[last]
                and value not in not_these
                and value.op == "call_function"
                and is_dense_tensor(value)
            ):
                depends_on[node] |= bits.setdefault(value, 1 << len(bits))
        for value, bit in bits.items():
            if depends_on[node] & bit:
                num_dependents[value] = num_dependents.get(value, 0) + 1
    return sorted(bits, key=lambda value: (num_dependents[value], position[value]))[-1:]
