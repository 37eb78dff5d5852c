"""Waits inside a forward graph that is compiled whole for the parameters that each part reads."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from ddp_compile import torch_internals
from ddp_compile.graph_ops import AWAIT_PARAMETERS
from ddp_compile.passes.analysis.aten_values import base_of, is_dense_tensor, value_to_hold
from ddp_compile.passes.pipeline import AotContext, PassResult

log = logging.getLogger(__name__)


class _Wait(NamedTuple):
    before: int  # position of the first node that reads one of them
    param_indices: list[int]
    parameters: list[fx.Node]


def await_parameters_pass(gm: fx.GraphModule, ctx: AotContext) -> PassResult:
    """Insert ``ddp_compile::await_parameters`` before the first node that reads a parameter of each bucket.

    before::

        mm = mm(x, weight_t)
        mm_1 = mm(mm, weight_1_t)

    after::

        await_parameters([weight], reducer_id=0, param_indices=[0], held=[])
        mm = mm(x, weight_t)
        await_parameters([weight_1], reducer_id=0, param_indices=[1], held=[mm])
        mm_1 = mm(mm, weight_1_t)

    Parameters that are in no bucket here, or are not the graph's own inputs, are waited for when the graph begins.
    """
    order = list(gm.graph.nodes)
    waits = _find_waits(gm, ctx, order)
    position = {node: i for i, node in enumerate(order)}
    until = len(order)
    for wait in sorted(waits, key=lambda wait: wait.before, reverse=True):
        last, following = order[wait.before - 1], order[wait.before : until]
        held = value_to_hold(following, position, last, wait.parameters)
        with gm.graph.inserting_before(order[wait.before]):
            arguments = (wait.parameters, ctx.reducer_id, wait.param_indices, held)
            gm.graph.call_function(AWAIT_PARAMETERS, arguments).meta["val"] = None
        until = wait.before
    log.info("%s: parameters are waited for in %d places", ctx.graph_name, len(waits))
    return PassResult(gm, len(waits))


def _find_waits(gm: fx.GraphModule, ctx: AotContext, order: Sequence[fx.Node]) -> list[_Wait]:
    placeholders = gm.graph.find_nodes(op="placeholder")
    input_of = zip(placeholders, torch_internals.positions_of_inputs(gm), strict=True)
    node_of = {
        ctx.parameter_of_input[i]: node
        for node, i in input_of
        if i is not None and i in ctx.parameter_of_input and is_dense_tensor(node)
    }
    first_reader = _first_readers(order)
    waits = []
    rest = set(ctx.reads)
    for bucket in ctx.buckets:
        found = [gradient.index for gradient in bucket.gradients if node_of.get(gradient.index) in first_reader]
        if found:
            parameters = [node_of[index] for index in found]
            waits.append(_Wait(min(first_reader[node] for node in parameters), found, parameters))
            rest.difference_update(found)
    if rest:
        begin = next(i for i, node in enumerate(order) if node.op != "placeholder")
        waits.append(_Wait(begin, sorted(rest), [node for node in placeholders if is_dense_tensor(node)]))
    return waits


def _first_readers(order: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Position of the first node that reads the memory of each input, directly or through a view."""
    found: dict[fx.Node, int] = {}
    for i, node in enumerate(order):
        if node.op == "call_function" and base_of(node) is node:
            for argument in node.all_input_nodes:
                found.setdefault(base_of(argument), i)
    return found
