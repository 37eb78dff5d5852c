"""Backward graphs as AOTAutograd makes them, built by hand node by node."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from graphs import buckets_of
from torch import fx
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput
from torch._subclasses.fake_tensor import FakeTensorMode

from ddp_compile.graph_ops import AWAIT_PARAMETERS
from ddp_compile.passes.pipeline import AotContext

aten = torch.ops.aten
bucket_ready = torch.ops.ddp_compile.bucket_ready.default


class BackwardBuilder:
    """Builds a graph of ATen operators; every node gets the fake tensor that its call returns."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()

    def input(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(4, 4)
        return node

    def call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        name = str(getattr(target, "overloadpacket", target.__name__)).rpartition(".")[2]
        node = self.graph.create_node("call_function", target, args, name=name)
        values = fx.node.map_arg(args, lambda argument: argument.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values)
        return node

    def output(self, *nodes: fx.Node | None, of: Sequence[int | None] | None = None) -> fx.GraphModule:
        """Return ``nodes``, one for each input of the forward, described as the gradients of the inputs ``of``."""
        output = self.graph.output(nodes)
        of = of or [None if node is None else i for i, node in enumerate(nodes)]
        output.meta["desc"] = [None if i is None else GradAOTOutput(grad_of=PlainAOTInput(idx=i)) for i in of]
        return fx.GraphModule({}, self.graph)


def context(*buckets: Sequence[int], reads: Sequence[int] = ()) -> AotContext:
    """Buckets of these parameters; input ``i`` of the forward is parameter ``i``."""
    of_input = {p: p for p in reads or (p for members in buckets for p in members)}
    return AotContext(
        parameter_of_input=of_input,
        buckets=buckets_of(*buckets),
        reads=tuple(reads),
        reducer_id=7,
        graph_name="graph 0",
    )


def calls(gm: fx.GraphModule) -> list[str]:
    """The calls of the graph in order; for operators of ours, the parameters of the bucket."""
    ours = {bucket_ready: "ready", AWAIT_PARAMETERS: "await"}
    return [
        f"{ours[node.target]} {node.args[2]}" if node.target in ours else node.name
        for node in gm.graph.nodes
        if node.op == "call_function"
    ]
