"""Calls the reducer inside a backward graph when a bucket's last gradient has been computed."""

import itertools
import logging
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ddp_compile import torch_internals
from ddp_compile.graph_ops import BUCKET_READY, HOLD_BACK, MOVE_BUCKET
from ddp_compile.passes.analysis.aten_values import base_of, is_dense_tensor, value_to_hold
from ddp_compile.passes.analysis.graph_nodes import is_expanded, is_input
from ddp_compile.passes.pipeline import AotContext, Declined, PassResult
from ddp_compile.plan.spec import BucketSpec

log = logging.getLogger(__name__)


class _ReadyBucket(NamedTuple):
    bucket: BucketSpec
    slots: list[int]  # positions of its gradients among the graph's outputs, in the bucket's order
    moves: bool  # whether the graph returns views of the flat buffer instead of them


def bucket_backward_pass(gm: fx.GraphModule, ctx: AotContext) -> PassResult:
    """Insert ``ddp_compile::bucket_ready`` after the last gradient of each bucket.

    before::

        mm = mm(x_t, tangents)       # gradient of a parameter of bucket 0
        mm_1 = mm(tangents, w_t)
        return (mm, ...)

    after::

        mm = mm(x_t, tangents)
        bucket_ready([mm], reducer_id=0, parameters=[5], held=[])
        mm_1 = mm(tangents, w_t)
        return (mm, ...)

    ``held`` is the value that most of the following nodes depend on. It keeps compilers from computing them first.

    If all gradients of a bucket may move (`AotContext.strides`), ``move_bucket`` and ``hold_back`` are inserted
    instead, and the graph returns the results of ``move_bucket``.

    A bucket is left to its parameters' hooks if the graph does not compute all of its gradients, or if nothing is left
    to compute after them, since then the hooks run equally early.
    """
    ready, declined = _find_buckets(gm, ctx)
    if not ready:
        return PassResult(gm, 0, tuple(declined))
    for entry in ready:
        for slot in () if entry.moves else entry.slots:
            _own_output(gm, slot)
    outputs = _outputs(gm)
    gradients = [[_node(outputs, slot) for slot in entry.slots] for entry in ready]
    num_calls = sum(node.op.startswith("call") for node in gm.graph.nodes)
    number = {node: i for i, node in enumerate((n for n in gm.graph.nodes if not is_input(n)), start=1)}
    for entry, nodes in zip(ready, gradients, strict=True):
        last = max(number.get(node, 0) for node in nodes)
        log.info("%s: bucket %d is ready after call %d of %d", ctx.graph_name, entry.bucket.index, last, num_calls)
    early = _before_the_end(gm, gradients)
    declined += _ready_at_the_end(gm, ready[early:], gradients[early:])
    _insert(gm, ctx, ready[:early], gradients[:early])
    return PassResult(gm, early, tuple(declined))


def _ready_at_the_end(
    gm: fx.GraphModule, ready: Sequence[_ReadyBucket], gradients: Sequence[Sequence[fx.Node]]
) -> Iterator[Declined]:
    """Each with the user's line that its last gradient comes from; node names differ between compilers."""
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    for entry, nodes in zip(ready, gradients, strict=True):
        index, last = entry.bucket.index, max(nodes, key=position.__getitem__)
        line = torch_internals.user_line_of(_computation_of(last))
        yield Declined("output", f"bucket {index} is ready when the graph ends", index, line)


def _before_the_end(gm: fx.GraphModule, gradients: Sequence[Sequence[fx.Node]]) -> int:
    """How many buckets, if launched in this order, are ready before the graph's last computation."""
    computed = [node for node in gm.graph.nodes if node.op == "call_function" and base_of(node) is node]
    last = _computation_of(computed[-1]) if computed else None
    at_the_end = (any(_computation_of(node) is last for node in nodes) for nodes in gradients)
    return next((i for i, is_last in enumerate(at_the_end) if is_last), len(gradients))


def _computation_of(node: fx.Node) -> fx.Node:
    """Resolve views and getitem to the computing node."""
    base = base_of(node)
    return base.all_input_nodes[0] if base.target is operator.getitem else base


def _insert(
    gm: fx.GraphModule, ctx: AotContext, ready: Sequence[_ReadyBucket], gradients: Sequence[Sequence[fx.Node]]
) -> None:
    order = list(gm.graph.nodes)
    position = {node: i for i, node in enumerate(order)}
    following, until = order[:0], len(order)
    # None before those that are launched earlier, since it would only wait for them.
    places = itertools.accumulate((max(map(position.__getitem__, nodes)) for nodes in gradients), max)
    # In reverse, so that buckets inserted after one node are in launch order.
    for entry, nodes, place in reversed(list(zip(ready, gradients, places, strict=True))):
        last = order[place]
        if last.op == "placeholder":  # placeholders stay together
            last = gm.graph.find_nodes(op="placeholder")[-1]
        if position[last] + 1 < until:  # else two buckets are ready at once
            following, until = order[position[last] + 1 : until], position[last] + 1
        held = value_to_hold(following, position, last, nodes)
        with gm.graph.inserting_after(last):
            if entry.moves:
                _insert_move(gm, ctx, entry, nodes, held)
            else:
                param_indices = [gradient.index for gradient in entry.bucket.gradients]
                call = gm.graph.call_function(BUCKET_READY, (list(nodes), ctx.reducer_id, param_indices, held))
                call.meta["val"] = None


def _insert_move(
    gm: fx.GraphModule, ctx: AotContext, entry: _ReadyBucket, nodes: Sequence[fx.Node], held: list[fx.Node]
) -> None:
    param_indices = [gradient.index for gradient in entry.bucket.gradients]
    strides = [stride for index in param_indices for stride in ctx.strides[index]]
    call = gm.graph.call_function(MOVE_BUCKET, (list(nodes), strides, ctx.reducer_id, param_indices))
    fakes = [node.meta["val"] for node in nodes]
    call.meta["val"] = torch_internals.call_with_fakes(MOVE_BUCKET, fakes, strides, ctx.reducer_id, param_indices)
    outputs = list(_outputs(gm))
    last = call
    for i, slot in enumerate(entry.slots):
        with gm.graph.inserting_after(last):
            last = outputs[slot] = gm.graph.call_function(operator.getitem, (call, i))
        last.meta["val"] = call.meta["val"][i]
    if held:
        with gm.graph.inserting_after(last):
            hold = gm.graph.call_function(HOLD_BACK, ([outputs[slot] for slot in entry.slots], held))
        hold.meta["val"] = None
    gm.graph.output_node().update_arg(0, tuple(outputs))


def _find_buckets(gm: fx.GraphModule, ctx: AotContext) -> tuple[list[_ReadyBucket], list[Declined]]:
    """The buckets whose gradients the graph computes, in launch order, and why the others are declined."""
    outputs = _outputs(gm)
    slot_of = {ctx.parameter_of_input[i]: i for i in _gradient_slots(gm) if i in ctx.parameter_of_input}
    ready, declined = [], []
    for bucket in ctx.buckets:
        missing = [g.fqn for g in bucket.gradients if g.index not in slot_of]
        empty = [
            g.fqn for g in bucket.gradients if g.index in slot_of and not is_dense_tensor(outputs[slot_of[g.index]])
        ]
        if bucket.is_sparse:
            (index,) = (gradient.index for gradient in bucket.gradients)
            node = outputs[slot_of[index]] if index in slot_of else None
            line = torch_internals.user_line_of(node) if isinstance(node, fx.Node) else None
            declined.append(Declined("output", f"bucket {bucket.index} is sparse", bucket.index, line))
        elif missing:
            reason = f"bucket {bucket.index} waits for gradients from elsewhere: {', '.join(missing)}"
            declined.append(Declined("output", reason, bucket.index))
        elif empty:
            reason = f"bucket {bucket.index} has parameters without a gradient here: {', '.join(empty)}"
            declined.append(Declined("output", reason, bucket.index))
        else:
            slots = [slot_of[g.index] for g in bucket.gradients]
            dtypes = [str(_node(outputs, slot).meta["val"].dtype) for slot in slots]
            fits = (
                g.index in ctx.strides and f"torch.{g.dtype}" == dtype
                for g, dtype in zip(bucket.gradients, dtypes, strict=True)
            )
            ready.append(_ReadyBucket(bucket, slots, moves=all(fits)))
    return ready, declined


def _gradient_slots(gm: fx.GraphModule) -> list[int]:
    """Positions of the outputs that are the gradient of the Dynamo graph's input at the same position.

    AOTAutograd returns one value for each input and describes whose gradient it is. Position and description must
    agree, since aliased inputs and flattened subclasses shift positions.
    """
    return [slot for slot, of in enumerate(torch_internals.inputs_of_gradients(gm)) if slot == of]


def _own_output(gm: fx.GraphModule, slot: int) -> None:
    """Make the output at ``slot`` a tensor that nothing else returns or holds.

    AccumulateGrad clones a tangent that is passed through, a tensor that two parameters share, and an expanded tensor.
    The reducer could not distinguish such a clone from a sum, so the clone is made here.
    """
    output, outputs = gm.graph.output_node(), _outputs(gm)
    node = _node(outputs, slot)
    is_input = base_of(node).op == "placeholder"
    is_shared = any(other is node for i, other in enumerate(outputs) if i != slot)
    if not (is_input or is_shared or is_expanded(node.meta["val"])):
        return
    with gm.graph.inserting_after(node):
        clone = gm.graph.call_function(torch.ops.aten.clone.default, (node,))
    clone.stack_trace = node.stack_trace
    # Not the node's own fake tensor: passes compare storages.
    clone.meta["val"] = torch_internals.call_with_fakes(torch.ops.aten.clone.default, node.meta["val"])
    output.update_arg(0, (*outputs[:slot], clone, *outputs[slot + 1 :]))


def _outputs(gm: fx.GraphModule) -> tuple[Any, ...]:
    (outputs,) = gm.graph.output_node().args
    assert isinstance(outputs, tuple | list)
    return tuple(outputs)


def _node(outputs: Sequence[Any], slot: int) -> fx.Node:
    node = outputs[slot]
    assert isinstance(node, fx.Node)
    return node
