"""Cuts one graph into partitions at given positions."""

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ddp_compile import torch_internals
from ddp_compile.passes.analysis.cut_constraints import is_autocast_enter, is_grad_off, mode_regions
from ddp_compile.passes.analysis.graph_nodes import example_value, is_constant
from ddp_compile.passes.analysis.views import ViewTrees


def partition_graph(gm: fx.GraphModule, cuts: Sequence[int]) -> fx.GraphModule:
    """Make each run of nodes between two cuts a submodule, and make a graph that calls these in order.

    Args:
        gm: A forward graph from Dynamo. It is not changed.
        cuts: Positions in ``gm``'s node list, ascending; each is the first node of a partition.

    Returns:
        A module with the placeholders and outputs of ``gm`` whose graph calls ``partition_0``, ``partition_1``, ...
        Each partition returns a tuple of the values that later partitions or the caller need. Its first inputs are
        SymInts, with every symbol in the sizes of its other inputs. Views are made again in each partition that uses
        them, and for the caller, so that outputs share no memory: see Note [Views across a cut].
    """
    runs = _runs_of_nodes(gm, cuts)
    place = {node: i for i, run in enumerate(runs) for node in run}
    regions = mode_regions(gm)
    trees = ViewTrees(gm, regions)
    returned = [node for node in gm.graph.output_node().all_input_nodes if not is_constant(node)]
    used = [*(node for run in runs for node in _used_from_outside(run)), *returned]
    crossing = trees.crossing(used, place)
    symbols = _symbol_nodes(gm)
    partitions = [
        _Partition(gm, i, run, _Views(trees, crossing, _used_from_outside(run), regions), symbols)
        for i, run in enumerate(runs)
    ]
    for_caller = _Views(trees, crossing, returned, regions)
    needed = set(for_caller.sources).union(*(partition.inputs for partition in partitions))
    autocasts: list[fx.Node] = []
    for partition in partitions:
        autocasts = partition.add_nodes(autocasts)
        partition.add_outputs(needed)
    return _stitch(gm, partitions, for_caller)


class _Views:
    """A graph's inputs, and the views that it makes of them to get ``used``."""

    def __init__(
        self,
        trees: ViewTrees,
        crossing: Mapping[fx.Node, fx.Node],
        used: Sequence[fx.Node],
        regions: Mapping[fx.Node, Sequence[str]],
    ) -> None:
        self.regions = regions
        remade: set[fx.Node] = set()
        for node in used:
            path = trees.path(node)
            remade.update(path[path.index(crossing[node]) + 1 :])
        # In the order of the whole graph, in which each view comes before its users.
        self.remade = [node for node in regions if node in remade]
        sources = [crossing[node] for node in used]
        sources += [argument for node in self.remade for argument in node.all_input_nodes if argument not in remade]
        self.attributes = {node for node in sources if node.op == "get_attr"}
        self.sources = [n for n in dict.fromkeys(sources) if n not in self.attributes and not is_constant(n)]

    def in_their_grad_mode(self, graph: fx.Graph, is_off: bool) -> Iterator[fx.Node]:
        """The views to make, in order. Switches the grad mode for each, and back to ``is_off`` after the last.

        A view that is made under ``no_grad`` has no history, although its example value requires a gradient.
        """
        mode = is_off
        for node in self.remade:
            if is_grad_off(self.regions[node]) != mode:
                mode = not mode
                graph.call_function(torch._C._set_grad_enabled, (not mode,))
            yield node
        if mode != is_off:
            graph.call_function(torch._C._set_grad_enabled, (not is_off,))


def _runs_of_nodes(gm: fx.GraphModule, cuts: Sequence[int]) -> list[list[fx.Node]]:
    bounds = [0, *cuts, len(gm.graph.nodes)]
    nodes = list(gm.graph.nodes)
    # Placeholders and the output belong to the graph that calls the partitions. A get_attr is copied to each user.
    return [
        [node for node in nodes[first:end] if node.op not in ("placeholder", "output", "get_attr")]
        for first, end in itertools.pairwise(bounds)
    ]


def _used_from_outside(run: Iterable[fx.Node]) -> list[fx.Node]:
    """The arguments of a run's nodes that come from outside, including attributes."""
    members = set(run)
    used = dict.fromkeys(argument for node in run for argument in node.all_input_nodes if argument not in members)
    return [node for node in used if not is_constant(node) and not is_autocast_enter(node)]


def _symbol_nodes(gm: fx.GraphModule) -> dict[Any, fx.Node]:
    """The first node that holds each symbol of the shape environment as a plain SymInt."""
    nodes: dict[Any, fx.Node] = {}
    for node in gm.graph.nodes:
        symbol = torch_internals.symbol_bound_by(example_value(node))
        if symbol is not None:
            nodes.setdefault(symbol, node)
    return nodes


class _Partition:
    """One partition while it is being built: its graph, inputs and outputs."""

    def __init__(
        self, gm: fx.GraphModule, index: int, run: list[fx.Node], views: _Views, symbols: dict[Any, fx.Node]
    ) -> None:
        self.gm = gm
        self.name = f"partition_{index}"
        self.run = run
        self.views = views
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.new_node: dict[fx.Node, fx.Node] = {}
        self.inputs = self._find_inputs(symbols)
        self.outputs: list[fx.Node] = []
        for node in self.inputs:
            placeholder = self.graph.placeholder(node.name, type_expr=node.type)
            placeholder.meta = node.meta.copy()
            self.new_node[node] = placeholder

    def _find_inputs(self, symbols: dict[Any, fx.Node]) -> list[fx.Node]:
        members = set(self.run)
        outside = dict.fromkeys(self.views.sources)
        for node in list(outside):
            if isinstance(example_value(node), torch.Tensor | torch.SymInt):
                mentioned = (symbols.get(symbol) for symbol in torch_internals.free_symbols(example_value(node)))
                outside.update({symbol: None for symbol in mentioned if symbol is not None and symbol not in members})
        return sorted(outside, key=lambda node: not isinstance(example_value(node), torch.SymInt))

    def add_nodes(self, open_autocasts: list[fx.Node]) -> list[fx.Node]:
        """Copy the nodes inside the autocast regions open before them; returns the regions open at the end."""
        # Grad mode is on here, or as at the start of the whole graph: no cut is where it was switched off.
        for node in self.views.in_their_grad_mode(self.graph, is_off=False):
            self._copy(node)
        still_open = list(open_autocasts)
        for enter in still_open:
            self._copy(enter)
        for node in self.run:
            self._copy(node)
            if is_autocast_enter(node):
                still_open.append(node)
            elif node.target is torch.amp.autocast_mode._exit_autocast:
                still_open.remove(node.args[0])  # type: ignore[arg-type]
        for enter in reversed(still_open):
            self.graph.call_function(torch.amp.autocast_mode._exit_autocast, (self.new_node[enter],))
        return still_open

    def add_outputs(self, needed: set[fx.Node]) -> None:
        self.outputs = [node for node in self.run if node in needed and not is_constant(node)]
        self.graph.output(tuple(self.new_node[node] for node in self.outputs))

    def module(self) -> fx.GraphModule:
        partition = fx.GraphModule(self.attributes, self.graph, class_name=self.name)
        torch_internals.copy_dynamo_metadata(self.gm, partition)
        return partition

    def _copy(self, node: fx.Node) -> None:
        if node.op == "call_module":
            self.attributes[str(node.target)] = self.gm.get_submodule(str(node.target))
        self.new_node[node] = self.graph.node_copy(node, self._argument)

    def _argument(self, node: fx.Node) -> Any:
        if node in self.new_node:
            return self.new_node[node]
        if node.op == "get_attr":
            self.attributes[str(node.target)] = operator.attrgetter(str(node.target))(self.gm)
            self.new_node[node] = self.graph.node_copy(node)
            return self.new_node[node]
        assert is_constant(node), f"{node.name} is neither in {self.name} nor one of its inputs"
        return example_value(node)


def _stitch(gm: fx.GraphModule, partitions: list[_Partition], for_caller: _Views) -> fx.GraphModule:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    modules = {partition.name: partition.module() for partition in partitions}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = graph.node_copy(node)
        elif node in for_caller.attributes:
            values[node] = graph.node_copy(node)
            modules[str(node.target)] = operator.attrgetter(str(node.target))(gm)
    for partition in partitions:
        call = graph.call_module(partition.name, tuple(values[node] for node in partition.inputs))
        for i, node in enumerate(partition.outputs):
            values[node] = graph.call_function(operator.getitem, (call, i))
            values[node].meta = node.meta.copy()
    output = gm.graph.output_node()

    def argument(node: fx.Node) -> Any:
        return example_value(node) if is_constant(node) else values[node]

    for node in for_caller.in_their_grad_mode(graph, is_grad_off(for_caller.regions[output])):
        values[node] = graph.node_copy(node, argument)
    graph.output(fx.node.map_arg(output.args[0], argument))
    stitched = fx.GraphModule(modules, graph, class_name="stitched")
    stitched.meta["partition_names"] = [partition.name for partition in partitions]
    return stitched


def partition_names(gm: fx.GraphModule) -> list[str]:
    """Names of a stitched graph's partitions, in order; none for a graph that was not cut."""
    return gm.meta.get("partition_names", [])
