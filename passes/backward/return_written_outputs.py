"""Makes operators write to the tensors that the graph returns, where inductor would copy them at the end."""

from __future__ import annotations

import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import OpOverload

from ddp_compile import torch_internals
from ddp_compile.passes.pipeline import AotContext, PassResult


def return_written_outputs_pass(gm: fx.GraphModule, ctx: AotContext) -> PassResult:
    """Choose the strides of outputs before the operators that are declared to write to them.

    Inductor chooses strides, for example channels_last for convolutions, and at the end of the graph copies an output
    to the strides that the graph declares. The operator would see the tensor before the copy.

    before::

        bucket_ready([convolution], reducer_id=0, parameters=[5], held=[])
        return (convolution,)

    after::

        returned = force_stride_order(convolution, [27, 9, 3, 1])
        bucket_ready([returned], reducer_id=0, parameters=[5], held=[])
        return (returned,)
    """
    output, num_changed = gm.graph.output_node(), 0
    for node in output.all_input_nodes:
        writers = [user for user in node.users if _writes_into(user, node)]
        strides = node.meta["val"].stride() if isinstance(node.meta.get("val"), Tensor) else ()
        if not writers or len(strides) < 2 or not all(isinstance(stride, int) for stride in strides):
            continue
        with gm.graph.inserting_after(node):
            returned = gm.graph.call_function(torch_internals.force_stride_order(), (node, list(strides)))
        returned.meta.update(node.meta)
        for user in (*writers, output):
            user.replace_input_with(node, returned)
        num_changed += 1
    return PassResult(gm, num_changed)


def _writes_into(user: fx.Node, node: fx.Node) -> bool:
    """Whether an operator is declared to write to a node's value."""
    if not isinstance(user.target, OpOverload):
        return False
    pairs = zip(user.target._schema.arguments, user.args, strict=False)
    written = [value for argument, value in pairs if argument.alias_info is not None and argument.alias_info.is_write]
    return any(value is node for value in pytree.tree_leaves(written))
