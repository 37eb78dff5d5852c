"""Turns sizes of tensors into SymInts, which can cross from one partition to the next."""

import functools
import operator
from typing import Any

import torch
from torch import fx

from ddp_compile.passes.analysis.graph_nodes import example_value
from ddp_compile.passes.pipeline import PassContext, PassResult


def unpack_sizes_pass(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    """Replace each ``x.size()`` of symbolic shape by one ``x.size(i)`` for each symbolic dimension.

    A tuple of SymInts cannot cross partitions, so it would hold every cut up to its last use. Single SymInts can cross.

    before::

        size = x.size()
        rows = size[0]
        z = y.view(size)

    after::

        size = x.size(0)
        z = y.view((size, 8))
        ...                                 # and so wherever rows was used
    """
    num_changed = 0
    for node in list(gm.graph.find_nodes(op="call_method", target="size")):
        if len(node.args) > 1 or node.kwargs or not isinstance(example_value(node), torch.Size):
            continue
        sizes = example_value(node)
        dimension = functools.cache(lambda i, node=node, sizes=sizes: _dimension(gm, node, i, sizes[i]))
        for user in list(node.users):
            if user.target is operator.getitem and isinstance(user.args[1], int):
                for user_of_size in list(user.users):
                    _replace_argument(user_of_size, user, dimension(user.args[1] % len(sizes)))
                gm.graph.erase_node(user)
            else:
                _replace_argument(user, node, tuple(dimension(i) for i in range(len(sizes))))
        gm.graph.erase_node(node)
        num_changed += 1
    return PassResult(gm, num_changed)


def _dimension(gm: fx.GraphModule, node: fx.Node, i: int, size: Any) -> Any:
    if not isinstance(size, torch.SymInt):
        return size
    with gm.graph.inserting_before(node):
        dimension = gm.graph.call_method("size", (node.args[0], i))
    dimension.meta = {**node.meta, "example_value": size}
    return dimension


def _replace_argument(user: fx.Node, node: fx.Node, value: Any) -> None:
    def swap(argument: fx.Node) -> Any:
        return value if argument is node else argument

    user.args = fx.node.map_arg(user.args, swap)
    user.kwargs = fx.node.map_arg(user.kwargs, swap)
