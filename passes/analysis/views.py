"""Which values of a forward graph are views of which others, and what of them crosses a cut.

Note [Views across a cut]
Of the values in one storage, a partition returns one. Of two outputs that share memory, AOTAutograd makes one again
from the other. If the other is a view itself, torch 2.13 does so wrongly, in torch.compile as well: with
``y = h.t(); return y, y.detach()`` the second is transposed twice. If AOTAutograd's result is read from a cache, a
``reshape`` of the other gets an invalid shape.

So a view does not cross beside its base: `partition_graph` makes it again where it is used. ``detach``, and anything
that returns its argument unchanged, such as ``contiguous``, are views here. What crosses is the last value of which all
views needed elsewhere are views: a single view crosses as itself, so that the gradient of a slice stays as small as the
slice. An expanded value, whose elements share memory, never crosses: torch 2.12 gives its gradient the same strides and
cannot write it. An input of the graph is available everywhere, so no view of it crosses. If the caller gets a view
beside its base, the graph that calls the partitions makes the view, and the two are related as in eager code.

A view is made again only if it is a function of torch with one tensor among its arguments, whose result Dynamo recorded
in that tensor's storage. Not made again are

- what writes, a tensor with a hook on its gradient, and ``as_strided``, which reaches beyond its argument;
- results of a higher-order operator, a custom autograd function or a custom operator: it computes, and its backward
  may treat two gradients differently from their sum;
- views made in inference mode. Those made under ``no_grad`` are made again under ``no_grad``.

If a value in the memory of another one would have to cross and cannot be made again, the cut is held. If such a value
was made under ``no_grad``, the cut is held even if it would cross alone, since AOTAutograd makes it again from its
partition's input, with a gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from ddp_compile import torch_internals
from ddp_compile.passes.analysis.graph_nodes import (
    aliases_by_storage,
    example_value,
    is_expanded,
    target_name,
    tensors_in,
    was_inplace,
    written_arguments,
)


class ViewTrees:
    """The views among a graph's values: trees whose roots are values that cannot be made again from another one.

    Args:
        gm: A forward graph as Dynamo made it; nodes added later belong to no tree.
        regions: The `mode_regions` of ``gm``.
    """

    def __init__(self, gm: fx.GraphModule, regions: Mapping[fx.Node, Sequence[str]]) -> None:
        self._viewed: dict[fx.Node, fx.Node] = {}
        for node in gm.graph.nodes:
            viewed = _viewed_tensor(node)
            if viewed is not None and not any("inference" in region for region in regions[node]):
                self._viewed[node] = viewed
        for node in list(self._viewed):
            # An element of a tuple is a view only if the tuple is one of views.
            if not isinstance(example_value(self._viewed[node]), Tensor) and self._viewed[node] not in self._viewed:
                del self._viewed[node]
        # The roots whose values share a storage, in graph order. A tuple does not cross, only its elements do.
        self.roots_in_storage = [
            [node for node in nodes if node not in self._viewed and isinstance(example_value(node), Tensor)]
            for nodes in aliases_by_storage(gm).values()
        ]
        self._roots_that_share = {root for roots in self.roots_in_storage if len(roots) > 1 for root in roots}

    def path(self, node: fx.Node) -> list[fx.Node]:
        """The views that make a value again: its root, each view in turn, and the value itself."""
        nodes = [node]
        while nodes[-1] in self._viewed:
            nodes.append(self._viewed[nodes[-1]])
        return nodes[::-1]

    def root(self, node: fx.Node) -> fx.Node:
        """The value that a value is a view of, in one or more steps; itself if it is no view."""
        return self.path(node)[0]

    def crossing(self, needed: Iterable[fx.Node], place: Mapping[fx.Node, Any]) -> dict[fx.Node, fx.Node]:
        """For each value needed outside its partition, the value that crosses: itself or one to make it again from.

        Args:
            needed: All values of the graph that are needed outside of the partition that makes them.
            place: The partition that makes a value; none for inputs.

        Returns:
            By value; the same for all values with one root.
        """
        trees: dict[fx.Node, list[fx.Node]] = {}
        for node in needed:
            trees.setdefault(self.root(node), []).append(node)
        crossing = {}
        for root, nodes in trees.items():
            chosen = root if root in self._roots_that_share else self._last_in_common(nodes, place)
            crossing.update(dict.fromkeys(nodes, chosen))
        return crossing

    def _last_in_common(self, nodes: list[fx.Node], place: Mapping[fx.Node, Any]) -> fx.Node:
        first, *others = (self.path(node) for node in nodes)
        chosen = first[0]
        for node in first[1:]:
            if place.get(node) != place.get(chosen) or any(node not in path for path in others):
                break
            value = example_value(node)
            if isinstance(value, Tensor) and torch_internals.is_plain_tensor(value) and not is_expanded(value):
                chosen = node
        return chosen


def is_only_view(node: fx.Node) -> bool:
    """Whether a node that returns memory of its arguments does nothing else, in the forward or in the backward."""
    if any(target_name(user) == "register_hook" for user in node.users):
        return False
    is_element = node.target is operator.getitem and not isinstance(example_value(node.all_input_nodes[0]), Tensor)
    return _is_function_of_torch(node.all_input_nodes[0] if is_element else node)


def _viewed_tensor(node: fx.Node) -> fx.Node | None:
    """The one argument that a node is a view of, or a tuple of views; see Note [Views across a cut]."""
    if not is_only_view(node) or target_name(node).endswith("_") or target_name(node) == "as_strided":
        return None
    arguments = [argument for argument in node.all_input_nodes if tensors_in(argument)]
    if len(arguments) != 1 or not tensors_in(node) or was_inplace(node):
        return None
    if any(True for _ in written_arguments(node)):
        return None
    keys = {torch_internals.storage_key(tensor) for value in (node, arguments[0]) for tensor in tensors_in(value)}
    return arguments[0] if len(keys) == 1 and None not in keys else None


def _is_function_of_torch(node: fx.Node) -> bool:
    if node.op == "call_method":
        return True
    if node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
        return False
    if isinstance(node.target, OpOverload | OpOverloadPacket):
        return str(node.target).startswith("aten.")
    module = getattr(node.target, "__module__", None) or ""
    return module in ("_operator", "builtins") or module.partition(".")[0] == "torch"
