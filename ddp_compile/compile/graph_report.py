"""What was done with each graph, for ``explain()`` and warnings."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Self

from torch import fx

from ddp_compile import torch_internals
from ddp_compile.passes.forward.partition_graph import partition_names
from ddp_compile.passes.pipeline import Declined
from ddp_compile.plan.spec import BucketSpec
from ddp_compile.torch_internals import SourceLine


class GraphPart(NamedTuple):
    """A part of a graph that is compiled by itself."""

    reads: tuple[int, ...]  #: indices of the reduced parameters that it reads
    first_node: str | None = None  #: name of the node before which the graph is cut; None for the first part


class GraphReport(NamedTuple):
    """What was done with one graph."""

    graph: int  #: ordinal among the graphs that Dynamo made of the module, recompiled ones included
    buckets: tuple[BucketSpec, ...]  #: with gradients from the graph, numbered as when it was compiled
    parts: tuple[GraphPart, ...]  #: graphs that were compiled; one if nothing was cut
    #: The cuts that were not made as planned; with ``launches_in_backward``, the buckets that are not launched inside
    #: the backward. Empty for compiled code from a cache.
    declined: tuple[Declined, ...] = ()
    launches_in_backward: bool = False
    not_cut: tuple[Declined, ...] = ()  #: of a graph left whole since it could not be cut for every bucket
    #: By name of the nodes that are named here: the innermost module whose call has the node, and the user's line.
    places: Mapping[str | None, tuple[str | None, SourceLine | None]] = MappingProxyType({})

    def with_places_of(self, gm: fx.GraphModule, names: Mapping[int, str]) -> Self:
        """The report with the places of nodes of its graph, given the names of submodules by ``id``."""
        of_declined = [declined.node for declined in (*self.declined, *self.not_cut)]
        named = {*of_declined, *(part.first_node for part in self.parts)}
        graphs = [gm, *(getattr(gm, name) for name in partition_names(gm))]
        places = {}
        for node in (node for part in graphs for node in part.graph.nodes if node.name in named):
            inside = next((names[i] for i in torch_internals.modules_of(node) if i in names), None)
            places[node.name] = inside, torch_internals.user_line_of(node)
        return self._replace(places=places)


def parts_of(gm: fx.GraphModule, parameter_of: Mapping[str, int]) -> tuple[GraphPart, ...]:
    """The partitions of a graph, or all of it, given the reduced parameter that each node of this name stands for."""

    def reads(part: fx.GraphModule) -> tuple[int, ...]:
        return tuple(parameter_of[node.name] for node in part.graph.nodes if node.name in parameter_of)

    partitions = [getattr(gm, name) for name in partition_names(gm)]
    first_nodes = [next(node.name for node in part.graph.nodes if node.op.startswith("call")) for part in partitions]
    parts = (GraphPart(reads(part), name) for part, name in zip(partitions, [None, *first_nodes[1:]], strict=True))
    return tuple(parts) if partitions else (GraphPart(reads(gm)),)
