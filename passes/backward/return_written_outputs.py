"""Makes operators write to the tensors that the graph returns, where inductor would copy them at the end."""

from torch import Tensor, fx
from torch._ops import OpOverload

from ddp_compile import torch_internals
from ddp_compile.passes.analysis.graph_nodes import written_arguments
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
        writers = [u for u in node.users if isinstance(u.target, OpOverload) and node in written_arguments(u)]
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
