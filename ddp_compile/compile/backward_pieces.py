"""Compiles a backward in pieces, for compilers that refuse graphs with unknown operators."""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ddp_compile.compile.graph_compiler import must_be_raised
from ddp_compile.graph_ops import OPERATORS
from ddp_compile.passes.forward.partition_graph import partition_graph
from ddp_compile.torch_internals import CompileBackward

log = logging.getLogger(__name__)


def compile_whole_or_in_pieces(
    compile_backward: CompileBackward, gm: fx.GraphModule, example_inputs: Sequence[Any], name: str
) -> Callable[..., Any]:
    """Compile a backward with our operators in it. If that fails, compile the pieces between them.

    Raises the compiler's exception if it is one for a piece, for a graph without our operators, or a request to Dynamo;
    or if memory ran out.
    """
    untouched = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    try:
        return compile_backward(gm, example_inputs)
    except Exception as error:
        _keep_results_together(untouched.graph)
        cuts = _cuts_around_operators(untouched)
        if not cuts or must_be_raised(error):
            raise
        # As text, since a log that kept the error would keep the frames of the backward pass that waits for this.
        said = str(error)
        log.warning(
            "%s: did not compile with the operators for buckets in it, so it is compiled in pieces between them: %s",
            name,
            said,
        )
        return _compile_pieces(compile_backward, partition_graph(untouched, cuts), example_inputs)


def _keep_results_together(graph: fx.Graph) -> None:
    """Move each getitem to right after its node, so that results cross to another piece as tensors."""
    for node in reversed(graph.find_nodes(op="call_function", target=operator.getitem)):
        node.args[0].append(node)


def _cuts_around_operators(gm: fx.GraphModule) -> list[int]:
    """The positions at which runs of our operators, with the getitems of their results, begin and end."""
    ours = [any(each.target in OPERATORS for each in (node, *node.all_input_nodes)) for node in gm.graph.nodes]
    return [i for i in range(1, len(ours)) if ours[i] != ours[i - 1]]


def _compile_pieces(
    compile_backward: CompileBackward, stitched: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    inputs_of = dict(zip(stitched.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    for call in stitched.graph.find_nodes(op="call_module"):
        name = str(call.target)
        piece = stitched.get_submodule(name)
        assert isinstance(piece, fx.GraphModule)
        calls = [node for node in piece.graph.nodes if node.op == "call_function"]
        if not calls or any(node.target in OPERATORS for node in calls):
            continue
        inputs = [inputs_of[node] if node in inputs_of else node.meta["val"] for node in call.args]
        function = _unboxed(compile_backward(piece, inputs))
        delattr(stitched, name)
        setattr(stitched, name, function)

    def run(arguments: list[Any]) -> Any:
        # Empties the list, and drops every value after the last piece that uses it.
        return fx.Interpreter(stitched).boxed_run(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _unboxed(function: Callable[..., Any]) -> Callable[..., Any]:
    if not getattr(function, "_boxed_call", False):
        return function
    return lambda *arguments: function(list(arguments))
