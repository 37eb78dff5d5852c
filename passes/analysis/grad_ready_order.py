"""The order in which a graph's parameters get their gradients in the backward.

The autograd engine runs the backward of later nodes first, so a parameter's gradient is complete once the backward of
the *earliest* node that uses it has run. Reading the forward graph from its end gives the order.
"""

from collections.abc import Mapping

from torch import fx

from ddp_compile.passes.analysis.graph_nodes import is_input, is_view_or_cast, requires_grad


def grad_ready_order(gm: fx.GraphModule, parameter_of: Mapping[str, int]) -> dict[int, int]:
    """The parameters of a Dynamo graph in gradient-ready order, each once.

    Args:
        gm: A forward graph as Dynamo made it.
        parameter_of: Index of the parameter that a placeholder or get_attr node stands for, by node name. Two nodes may
            stand for one parameter.

    Returns:
        For each parameter that a node computes with while gradients are recorded, the position of the earliest such
        node; latest use first. Parameters of one node (weight and bias of a linear layer) are in reverse registration
        order, in which the engine reaches them.
    """
    earliest: dict[int, int] = {}
    # The parameters that a node is, or is a view or cast of.
    roots: dict[fx.Node, frozenset[int]] = {}
    for position, node in enumerate(gm.graph.nodes):
        if node.name in parameter_of and is_input(node):
            roots[node] = frozenset((parameter_of[node.name],))
            continue
        parameters = frozenset[int]().union(*(roots.get(argument, ()) for argument in node.all_input_nodes))
        if not parameters or (node.op != "output" and not requires_grad(node)):
            continue
        if is_alias_of_parameters(node, roots):
            roots[node] = parameters
            continue
        for parameter in parameters:
            earliest.setdefault(parameter, position)
    return dict(sorted(earliest.items(), key=lambda entry: (-entry[1], -entry[0])))


def is_alias_of_parameters(node: fx.Node, roots: Mapping[fx.Node, frozenset[int]]) -> bool:
    """Whether a node is a view or cast of parameters only. ``weight[token_ids]`` is not: it uses another tensor too."""
    return is_view_or_cast(node) and all(argument in roots for argument in node.all_input_nodes)
