"""The inner compiler, and what is said if it fails."""

import logging
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
