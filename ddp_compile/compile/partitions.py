"""Compiles the partitions of a split graph."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ddp_compile import torch_internals

#: (partition, its example inputs, its name) -> the compiled function.
CompilePartition = Callable[[fx.GraphModule, Sequence[Any], str], Callable[..., Any]]


def compile_partitions(
    stitched: fx.GraphModule, example_inputs: Sequence[Any], compile_partition: CompilePartition
) -> Callable[..., Any]:
    """Compile each partition of a split forward graph; returns a function with the arguments and results of all of it.

    No partition is run. Fake tensors with the sizes and strides that Dynamo recorded describe the values that cross.
    Inductor keeps the strides of outputs, so they also hold for compiled code.

    ``stitched`` is the result of `partition_graph`. Its partitions are replaced by the compiled functions.
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
        # As a plain attribute, which the generated code calls without nn.Module's call protocol.
        delattr(stitched, name)
        setattr(stitched, name, function)
    return stitched.forward
