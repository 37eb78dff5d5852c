"""Moves views and casts of parameters to where they are used."""

from torch import fx

from ddp_compile.passes.analysis.cut_constraints import mode_regions
from ddp_compile.passes.analysis.grad_ready_order import is_alias_of_parameters
from ddp_compile.passes.analysis.graph_nodes import aliases_by_storage, aliases_of, is_input, written_arguments
from ddp_compile.passes.pipeline import PassContext, PassResult


def sink_parameter_views_pass(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    """Move each view or cast of a parameter to right before its first use.

    If a parameter is cast at the start of the forward, its gradient is only ready after the backward of the first
    partition, which runs last.

    before::

        w2_half = w2.half()
        h = linear(x, w1)
        y = linear(h, w2_half)

    after::

        h = linear(x, w1)
        w2_half = w2.half()
        y = linear(h, w2_half)
    """
    roots, movable = _parameter_views(gm, ctx)
    # A view must not move past a write to its parameter.
    storages = aliases_by_storage(gm)
    targets = [target for node in gm.graph.nodes for target in written_arguments(node)]
    written = {root for target in targets for alias in aliases_of(target, storages) for root in roots.get(alias, ())}
    regions = mode_regions(gm)
    num_moved = 0
    for node in reversed(movable):
        if not node.users or not written.isdisjoint(roots[node]):
            continue
        first_use = min(node.users)  # nodes are ordered as in their graph
        if first_use is node.next or regions[node] != regions[first_use]:
            continue
        first_use.prepend(node)
        num_moved += 1
    return PassResult(gm, num_moved)


def _parameter_views(gm: fx.GraphModule, ctx: PassContext) -> tuple[dict[fx.Node, frozenset[int]], list[fx.Node]]:
    """The parameters that each node is or is a view of, and the views in graph order."""
    roots: dict[fx.Node, frozenset[int]] = {}
    views = []
    for node in gm.graph.nodes:
        if node.name in ctx.parameter_of and is_input(node):
            roots[node] = frozenset((ctx.parameter_of[node.name],))
        elif node.all_input_nodes and is_alias_of_parameters(node, roots):
            roots[node] = frozenset[int]().union(*(roots[argument] for argument in node.all_input_nodes))
            views.append(node)
    return roots, views
