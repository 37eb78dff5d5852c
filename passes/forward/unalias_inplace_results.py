"""Replaces the results of in-place operations by their targets."""

from torch import fx

from ddp_compile.passes.analysis.graph_nodes import returns_what_it_writes
from ddp_compile.passes.pipeline import PassContext, PassResult


def unalias_inplace_results_pass(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    """Replace the result of an in-place operation by its target, which is the same tensor.

    A counter that several layers increment is one buffer, which any partition may write. Under the names of the results
    it looks like a chain of views, which a partition may not write.

    before::

        count_1 = iadd(count, 1)
        count_2 = iadd(count_1, 1)
        return (count_2,)

    after::

        iadd(count, 1)
        iadd(count, 1)
        return (count,)
    """
    num_changed = 0
    for node in gm.graph.nodes:
        target = returns_what_it_writes(node)
        if target is not None and node.users:
            node.replace_all_uses_with(target)
            num_changed += 1
    return PassResult(gm, num_changed)
