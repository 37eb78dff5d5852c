"""Small graphs for tests of the passes: built by hand node by node, or captured by Dynamo from a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ddp_compile.passes.pipeline import PassContext
from ddp_compile.plan.spec import BucketSpec, GradientSpec

WIDTH = 4


class Captured(NamedTuple):
    """A graph as Dynamo hands it to a backend."""

    gm: fx.GraphModule
    inputs: list[Any]


def capture(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Captured:
    """The one graph that Dynamo makes of a call."""
    graphs: list[Captured] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(Captured(gm, list(inputs)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    torch._dynamo.reset()
    (captured,) = graphs
    return captured


def find(gm: fx.GraphModule, name: str, which: int = 0) -> int:
    """Position of the ``which``-th node that calls something of this name."""
    positions = [
        i
        for i, node in enumerate(gm.graph.nodes)
        if node.op.startswith("call") and name in (node.target, getattr(node.target, "__name__", None))
    ]
    return positions[which]


class GraphBuilder:
    """Builds a graph by hand; every node gets the value that its call really returns."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.parameter_of: dict[str, int] = {}

    def input(self, name: str, value: Any = None) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["example_value"] = torch.ones(WIDTH, WIDTH) if value is None else value
        return node

    def parameter(self, index: int, name: str | None = None, *shape: int, get_attr: bool = False) -> fx.Node:
        name = name or f"p{index}"
        value = nn.Parameter(torch.ones(shape or (WIDTH, WIDTH)))
        if get_attr:
            self.attributes[name] = value
        node = self.graph.get_attr(name) if get_attr else self.graph.placeholder(name)
        node.meta["example_value"] = value
        self.parameter_of[node.name] = index
        return node

    def call(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
        """A call_method node for a name, else a call_function node."""
        make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        node = make(target, args, kwargs)
        values = fx.node.map_arg((args, kwargs), lambda argument: argument.meta["example_value"])
        function = getattr(torch.Tensor, target) if isinstance(target, str) else target
        node.meta["example_value"] = function(*values[0], **values[1])
        return node

    def output(self, *nodes: fx.Node) -> fx.GraphModule:
        self.graph.output(nodes)
        return fx.GraphModule(self.attributes, self.graph)


class Chain(NamedTuple):
    """``num_layers`` times tanh(x @ weight), the parameters in registration order."""

    gm: fx.GraphModule
    parameter_of: dict[str, int]


def chain(num_layers: int) -> Chain:
    build = GraphBuilder()
    x = build.input("x")
    weights = [build.parameter(i) for i in range(num_layers)]
    for weight in weights:
        x = build.call(torch.tanh, build.call(torch.matmul, x, weight))
    return Chain(build.output(x), build.parameter_of)


def buckets_of(*members: Sequence[int]) -> tuple[BucketSpec, ...]:
    return tuple(
        BucketSpec(i, tuple(GradientSpec(p, f"p{p}", 1, "float32", "cpu") for p in indices), 1)
        for i, indices in enumerate(members)
    )


def context(parameter_of: dict[str, int], *members: Sequence[int]) -> PassContext:
    return PassContext(parameter_of=parameter_of, buckets=buckets_of(*members), graph_name="graph 0")


class MLP(nn.Module):
    """Three linear layers, tanh between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(F.linear(x, layer.weight, layer.bias))
        return x
