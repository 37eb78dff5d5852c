"""Compiles a graph with the inner compiler, and each partition of a split graph."""

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ddp_compile import torch_internals
from ddp_compile.errors import this_rank
from ddp_compile.torch_internals import GraphEdit, InnerBackend

log = logging.getLogger(__name__)


def compile_graph(
    inner: InnerBackend, gm: fx.GraphModule, example_inputs: Sequence[Any], name: str, edit: GraphEdit | None = None
) -> Callable[..., Any]:
    """Compile one graph with the inner compiler; returns a function with the arguments and results of the graph.

    The compiler may change ``gm``. ``example_inputs`` are real or fake tensors, one entry for each placeholder.
    ``edit`` changes the graphs that AOTAutograd makes; only with a compiler that `editing_backend` knows. Raises what
    the compiler does. Inductor compiles a backward in the first backward pass, and raises its error there.
    """
    try:
        with torch_internals.without_wrong_cache_entries(gm):
            if edit is None:
                return inner(gm, list(example_inputs))
            compile_and_edit = torch_internals.editing_backend(inner)
            assert compile_and_edit is not None, "see `launches_in_backward`"
            return compile_and_edit(gm, list(example_inputs), edit)
    except Exception as error:
        if not torch_internals.is_request_to_dynamo(error):  # whose error does not say which graph and which rank
            log.error(
                f"{this_rank()}: {name} did not compile. torch._dynamo.config.suppress_errors = True runs such code"
                ' eagerly, with the same gradients; split="backward" cuts no graph, and backend="aot_eager" compiles'
                " nothing"
            )
        raise


def compile_partitions(
    stitched: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_partition: Callable[[fx.GraphModule, Sequence[Any], str], Callable[..., Any]],
) -> Callable[..., Any]:
    """Compile each partition of a split forward graph; returns a function with the arguments and results of all of it.

    No partition is run. Fake tensors with the sizes and strides that Dynamo recorded describe the values that cross.
    Inductor keeps the strides of outputs, so they also hold for compiled code.

    ``stitched`` is the result of `partition_graph`. Its partitions are replaced by the compiled functions, which
    ``compile_partition`` makes of a partition, its example inputs and its name.
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
