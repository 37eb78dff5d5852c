"""Compiles the partitions of a split graph one by one and puts the results in their places."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ddp_compile import torch_internals

#: (partition, its example inputs, its name) -> what runs in its place.
CompilePartition = Callable[[fx.GraphModule, Sequence[Any], str], Callable[..., Any]]


def compile_partitions(
    stitched: fx.GraphModule, example_inputs: Sequence[Any], compile_partition: CompilePartition
) -> Callable[..., Any]:
    """Compile each partition of a split forward graph.

    No partition is run: what crosses to the next one is described by fake tensors made from the sizes and strides that
    Dynamo recorded. Inductor keeps the strides of values the caller sees, so they hold for the compiled code as well.

    Args:
        stitched: What `passes.forward.partition_graph` returned. Its partitions are replaced by the compiled functions.
        example_inputs: What Dynamo gave for the whole graph: one entry for each placeholder.
        compile_partition: Compiles one partition for given example inputs.

    Returns:
        A function with the arguments and results of the whole graph.
    """
    fake_mode = torch_internals.fake_mode_of(example_inputs)
    placeholders = stitched.graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Any] = {
        node: torch_internals.to_fake(value, fake_mode)
        for node, value in zip(placeholders, example_inputs, strict=True)
    }
    compiled: dict[str, Callable[..., Any]] = {}
    for node in stitched.graph.nodes:
        if node.op == "call_module":
            partition = stitched.get_submodule(node.target)
            assert isinstance(partition, fx.GraphModule)
            with torch_internals.partition_tracing_context(fake_mode, partition):
                inputs = [values[argument] for argument in node.args]
                compiled[node.target] = compile_partition(partition, inputs, node.target)
        elif node.target is operator.getitem and node.args[0].op == "call_module":
            values[node] = torch_internals.fake_like(node.meta["example_value"], fake_mode)
    for name, function in compiled.items():
        # A plain attribute in the submodule's place: the generated code calls it without nn.Module's call protocol.
        delattr(stitched, name)
        setattr(stitched, name, function)
    return stitched.forward
