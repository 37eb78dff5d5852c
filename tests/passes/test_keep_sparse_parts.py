"""The parts of sparse gradients are read after everything else has been computed."""

import torch
from backward_graphs import context
from torch import fx

from ddp_compile.graph_ops import HOLD_BACK
from ddp_compile.passes.backward.keep_sparse_parts import keep_sparse_parts_pass
from ddp_compile.torch_internals import SPARSE_FROM_PARTS


def graph_of(is_sparse: bool) -> fx.GraphModule:
    graph = fx.Graph()
    indices, values, x = map(graph.placeholder, ("indices", "values", "x"))
    first = graph.call_function(SPARSE_FROM_PARTS, (1, 1, [5, 4], indices, values)) if is_sparse else values
    graph.output((first, graph.call_function(torch.neg, (x,))))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_parts_are_read_last() -> None:
    gm = graph_of(is_sparse=True)
    result = keep_sparse_parts_pass(gm, context())
    *_, negated, last, _ = gm.graph.nodes
    assert result.num_changed == 1 and last.target is HOLD_BACK
    assert [[node.name for node in nodes] for nodes in last.args] == [["indices", "values"], [negated.name]]


def test_dense_gradients_need_nothing() -> None:
    gm = graph_of(is_sparse=False)
    assert keep_sparse_parts_pass(gm, context()).num_changed == 0
    assert gm.graph.find_nodes(op="call_function", target=HOLD_BACK) == []
