"""Keeps the memory of sparse gradients from being reused before the graph that returns them ends."""

from torch import fx

from ddp_compile.graph_ops import HOLD_BACK
from ddp_compile.passes.pipeline import AotContext, PassResult
from ddp_compile.torch_internals import SPARSE_FROM_PARTS


def keep_sparse_parts_pass(gm: fx.GraphModule, ctx: AotContext) -> PassResult:
    """Read the indices and values of sparse tensors at the end of the graph.

    A sparse tensor uses the memory of its parts. Inductor (torch 2.13) does not know this, and overwrites the values
    with later results of the same size.

    before::

        mm = mm(tangents, w)
        sparse = _sparse_coo_tensor_with_dims_and_tensors(1, 1, [5, 4], indices, mm)
        mm_1 = mm(tangents_t, x)
        return (sparse, mm_1)

    after::

        mm = mm(tangents, w)
        sparse = _sparse_coo_tensor_with_dims_and_tensors(1, 1, [5, 4], indices, mm)
        mm_1 = mm(tangents_t, x)
        hold_back([indices, mm], held=[mm_1])
        return (sparse, mm_1)
    """
    made = gm.graph.find_nodes(op="call_function", target=SPARSE_FROM_PARTS)
    output = gm.graph.output_node()
    # HOLD_BACK is declared to write to all other results, so it runs after them.
    computed = [node for node in dict.fromkeys(output.all_input_nodes) if node.op == "call_function"]
    held = [node for node in computed if node not in made]
    if not made or not held:
        return PassResult(gm, 0)
    parts = [part for node in made for part in node.args[3:5]]
    with gm.graph.inserting_before(output):
        gm.graph.call_function(HOLD_BACK, (parts, held))
    return PassResult(gm, len(made))
