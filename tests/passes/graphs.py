"""Small graphs for tests of the passes: recorded from a function, built node by node, or captured by Dynamo."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.proxy import GraphAppendingTracer

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


def names(nodes: Iterable[fx.Node]) -> list[str]:
    return [node.name for node in nodes]


def calls(gm: fx.GraphModule) -> list[str]:
    """Names of the nodes that call something."""
    return names(node for node in gm.graph.nodes if node.op.startswith("call"))


def partitions_of(stitched: fx.GraphModule) -> list[fx.GraphModule]:
    return [stitched.get_submodule(node.target) for node in stitched.graph.find_nodes(op="call_module")]


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

    def parameter(self, index: int, attribute: str = "") -> fx.Node:
        """An input, or an attribute of the graph with this name."""
        value = nn.Parameter(torch.ones(WIDTH, WIDTH))
        if attribute:
            self.attributes[attribute] = value
        node = self.graph.get_attr(attribute) if attribute else self.graph.placeholder(f"p{index}")
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


class Recorded(NamedTuple):
    """A graph, and the parameters among its placeholders by name."""

    gm: fx.GraphModule
    parameter_of: dict[str, int]


class _Recorder(GraphAppendingTracer):
    """Notes on every node the value that its call returns."""

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> fx.Proxy:
        proxy: fx.Proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        if kind.startswith("call"):
            node = proxy.node
            values = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["example_value"])
            function = getattr(torch.Tensor, target) if kind == "call_method" else target
            node.meta["example_value"] = function(*values[0], **values[1])
        return proxy

    def call(self, target: Callable[..., Any], *args: Any) -> fx.Proxy:
        """Record a call that no proxy takes part in, or that Python would turn into another one."""
        return self.create_proxy("call_function", target, args, {})


def record(function: Callable[..., Any], **values: Any) -> Recorded:
    """Record the calls of a function, which returns one output or a tuple.

    Its arguments named ``p0``, ``p1_head``, ... are the parameters 0 and 1; ``call`` is `_Recorder.call`; others are
    inputs. ``values`` replaces the [`WIDTH`, `WIDTH`] tensors of ones that they stand for.
    """
    graph = fx.Graph()
    recorder = _Recorder(graph)
    parameter_of, arguments = {}, []
    for name in inspect.signature(function).parameters:
        if name == "call":
            arguments.append(recorder.call)
            continue
        value = values.get(name, torch.ones(WIDTH, WIDTH))
        if name[0] == "p" and name[1].isdigit():
            parameter_of[name] = int(name[1:].partition("_")[0])
            value = nn.Parameter(value)
        arguments.append(recorder.create_proxy("placeholder", name, (), {}))
        arguments[-1].node.meta["example_value"] = value
    returned = function(*arguments)
    graph.output(recorder.create_arg(returned if isinstance(returned, tuple) else (returned,)))
    return Recorded(fx.GraphModule({}, graph), parameter_of)


def chain(num_layers: int) -> Recorded:
    """``num_layers`` times tanh(x @ weight), the parameters in registration order."""
    build = GraphBuilder()
    x = build.input("x")
    weights = [build.parameter(i) for i in range(num_layers)]
    for weight in weights:
        x = build.call(torch.tanh, build.call(torch.matmul, x, weight))
    return Recorded(build.output(x), build.parameter_of)


def buckets_of(*members: Sequence[int]) -> tuple[BucketSpec, ...]:
    return tuple(
        BucketSpec(i, tuple(GradientSpec(p, f"p{p}", 1, "float32", "cpu") for p in indices), 1)
        for i, indices in enumerate(members)
    )


def context(parameter_of: dict[str, int], *members: Sequence[int]) -> PassContext:
    return PassContext(parameter_of=parameter_of, buckets=buckets_of(*members), graph_name="graph 0")
