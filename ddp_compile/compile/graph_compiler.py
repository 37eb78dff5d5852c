"""The inner compiler. Graphs that it cannot compile run eagerly."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ddp_compile import torch_internals
from ddp_compile.errors import this_rank
from ddp_compile.report.explanation import Failure
from ddp_compile.torch_internals import GraphEdit, InnerBackend

log = logging.getLogger(__name__)


class GraphCompiler:
    """The inner compiler of one module. A graph that it cannot compile runs eagerly, with a warning.

    One rank may fail while others succeed, because it lacks a C++ compiler or disk space. If it runs the graph eagerly,
    the gradients are the same, only later. An exception would leave the other ranks waiting for this rank's buckets.

    Args:
        fullgraph: Whether to raise the compiler's error instead of running eagerly.
    """

    def __init__(self, inner: InnerBackend, fullgraph: bool) -> None:
        self.inner = inner
        self.fullgraph = fullgraph
        self.failures: list[Failure] = []

    def compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], name: str, edit: GraphEdit | None = None
    ) -> Callable[..., Any]:
        """Compile one graph. If that fails, it runs eagerly.

        Inductor compiles a backward in the first backward pass, and an error of it is raised there, as under
        ``torch.compile``.

        Args:
            gm: The graph; the compiler may change it.
            example_inputs: Real or fake tensors, one entry for each placeholder.
            edit: A change to the graphs that AOTAutograd makes; if the forward fails, ``gm`` runs without it.

        Returns:
            A function with the arguments and results of the graph.

        Raises:
            Exception: The compiler's, if ``fullgraph`` is set, if it asks Dynamo to trace again or to skip the frame,
                or if memory ran out, since running eagerly would need more.
        """
        if self.fullgraph:
            return self._compile(gm, list(example_inputs), edit)
        uncompiled = _copy_graphs(gm)
        try:
            return self._compile(gm, list(example_inputs), edit)
        except Exception as error:
            self._accept_failure(error, name)
            return uncompiled.forward

    def _compile(self, gm: fx.GraphModule, inputs: list[Any], edit: GraphEdit | None) -> Callable[..., Any]:
        with torch_internals.without_wrong_cache_entries(gm):
            if edit is None:
                return self.inner(gm, inputs)
            compile_and_edit = torch_internals.editing_backend(self.inner)
            assert compile_and_edit is not None, "see `launches_in_backward`"
            return compile_and_edit(gm, inputs, edit)

    def _accept_failure(self, error: Exception, graph: str) -> None:
        """Warn that a graph runs eagerly, or raise its error if it must not."""
        if torch_internals.is_request_to_dynamo(error) or _ran_out_of_memory(error):
            raise error
        in_one_line = _in_one_line(error)  # the exception's traceback would keep the graph alive
        self.failures.append(Failure(graph, in_one_line))
        log.debug("%s: %s did not compile", this_rank(), graph, exc_info=error)
        advice = _WAYS_OUT if len(self.failures) == 1 else ""
        log.warning("%s: %s did not compile and runs eagerly: %s%s", this_rank(), graph, in_one_line, advice)


_WAYS_OUT = (
    '. Gradients stay correct, only slower. TORCH_LOGS="+ddp_compile" shows the whole error, fullgraph=True raises it,'
    ' and backend="aot_eager" compiles nothing'
)


def _copy_graphs(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graphs, with the same tensors, since compilers rewrite their graphs."""
    copied = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for name, child in copied.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, _copy_graphs(child))
    return copied


def _ran_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        error = getattr(error, "inner_exception", None)  # compilers wrap errors in theirs
    return False


def _in_one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["without a message"]
    return f"{type(error).__name__}: {lines[0].strip()[:200]}".rstrip(".:")
