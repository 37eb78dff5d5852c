"""Which values of a forward graph are views of others, and which of them cross a cut.

Note [Views across a cut]
A partition returns only one of the values in one storage. If two outputs share memory, AOTAutograd makes one again from
the other. If the other is itself a view, torch 2.13 does so wrongly, in plain torch.compile too: with ``y = h.t();
return y, y.detach()`` the second output is transposed twice. If AOTAutograd's result comes from a cache, a ``reshape``
of the other gets an invalid shape.

So a view does not cross together with its base: `partition_graph` makes it again where it is used. ``detach``, and
everything that returns its argument unchanged, such as ``contiguous``, count as views here. The value that crosses is
the last one from which all values needed elsewhere can be made as views. So a single view crosses itself, and the
gradient of a slice stays as small as the slice. An expanded value, whose elements share memory, never crosses: torch
2.12 gives its gradient the same strides and cannot write to it. An input of the graph is available everywhere, so no
view of it crosses. If the caller gets both a view and its base, the graph that calls the partitions makes the view, and
the two are related as in eager code.

A view is made again only if it is a function of torch with one tensor among its arguments, whose result Dynamo recorded
in that tensor's storage. Not made again are

- operations that write, tensors with a hook on their gradient, and ``as_strided``, which reaches beyond its argument;
- results of higher-order operators, custom autograd functions and custom operators, which compute, and whose backward
  may treat two gradients differently from their sum;
- views made in inference mode. Those made under ``no_grad`` are made again under ``no_grad``.

If a value in another one's memory would have to cross and cannot be made again, the cut is held. If such a value was
made under ``no_grad``, the cut is held even if only this value would cross, since AOTAutograd makes it again from its
partition's input, with a gradient.
"""

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

    ``regions`` are the `mode_regions` of the graph. Nodes added later belong to no tree.
    """

    def __init__(self, gm: fx.GraphModule, regions: Mapping[fx.Node, Sequence[str]]) -> None:
        self._viewed: dict[fx.Node, fx.Node] = {}
        for node in gm.graph.nodes:
            viewed = _viewed_tensor(node)
            if viewed is not None and not any("inference" in region for region in regions[node]):
                self._viewed[node] = viewed
        for node in list(self._viewed):
            # An element of a tuple is a view only if the tuple contains views.
            if not isinstance(example_value(self._viewed[node]), Tensor) and self._viewed[node] not in self._viewed:
                del self._viewed[node]
        # The roots whose values share a storage, in graph order. Tuples do not cross, only their elements.
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
        """The value that a value is a view of, in one or more steps; the value itself if it is not a view."""
        return self.path(node)[0]

    def crossing(self, needed: Iterable[fx.Node], place: Mapping[fx.Node, Any]) -> dict[fx.Node, fx.Node]:
        """For each value needed outside its partition, the value that crosses: itself, or one to make it again from.

        The same value crosses for all with one root. ``needed`` are all values of the graph that are needed outside the
        partition that makes them. ``place`` is the partition that makes a value; inputs have none.
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
    """Whether a node that returns memory of its arguments does nothing else, in forward and backward."""
    if any(target_name(user) == "register_hook" for user in node.users):
        return False
    is_element = node.target is operator.getitem and not isinstance(example_value(node.all_input_nodes[0]), Tensor)
    return _is_function_of_torch(node.all_input_nodes[0] if is_element else node)


def _viewed_tensor(node: fx.Node) -> fx.Node | None:
    """The argument that a node is a view of, or a tuple of views of; see Note [Views across a cut]."""
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
