"""Compilation of graphs: edits, and caches that may answer wrongly.

Note [Graphs kept out of AOTAutograd's cache]
*Floats that vary.* Dynamo passes a Python float that has had several values as a tensor and a symbol. If an operator
takes no symbol, AOTAutograd compiles the value into the graph, under a guard that it adds while it traces. Neither the
value nor the guard is in the key, and a hit does not restore the guard. So the cache returns a graph for another float,
which Dynamo then runs for all floats (pytorch/pytorch#194976; #197889 is open in torch 2.14). FXGraphCache is correct,
since its key is the graph including the value.

*Outputs that share memory.* AOTAutograd replays their views on the common base. Up to torch 2.13 the recorded view of a
matrix product comes back from a cache with sizes read from freed memory (pytorch/pytorch#185861).
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.utils import _pytree as pytree

from ddp_compile.torch_internals.dynamo import InnerBackend, order_keeping_settings, without_wrong_donations
from ddp_compile.torch_internals.tensors import free_symbols, storage_key


def force_stride_order() -> Any:
    """Inductor's operator that returns its argument with these strides."""
    from torch._inductor import inductor_prims

    return inductor_prims.force_stride_order


class GraphEdit(NamedTuple):
    """A change to AOTAutograd's forward and backward graphs before they are compiled, unless a cache has them."""

    backward: Callable[[fx.GraphModule, bool], None]  #: called with the backward graph and whether it is inductor's
    cache_key: str  #: different for edits that make different graphs, the same in every process for the same edit
    forward: Callable[[fx.GraphModule], None] | None = None  #: called with the forward graph


#: Like `InnerBackend`, with an edit of the backward.
EditingBackend = Callable[[fx.GraphModule, list[Any], GraphEdit], Callable[..., Any]]


def editing_backend(inner: InnerBackend) -> EditingBackend | None:
    """A backend that compiles like ``inner`` and edits graphs; None if it is not known to compile our operators.

    Known are inductor, ``compile_fx`` with or without the user's ``inner_compile``, and ``aot_eager``. Raises a
    ValueError if the backend's ``inner_compile`` is not callable.
    """
    from torch._dynamo.backends import debugging

    if isinstance(inner, torch._TorchCompileInductorWrapper):
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        return functools.partial(_compile_with_inductor, compile_fx, compile_fx_inner, inner.config)
    compiler: Any = getattr(inner, "compiler_fn", None)
    if compiler is debugging.aot_eager:
        run_as_it_is: Any = debugging.boxed_nop
        return functools.partial(_compile_with_aot_eager, debugging.aot_eager, run_as_it_is)
    try:
        parameters = inspect.signature(compiler).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return None
    if not {"inner_compile", "config_patches"} <= set(parameters):
        return None
    inner_compile, patches = parameters["inner_compile"].default, parameters["config_patches"].default
    if not callable(inner_compile):
        raise ValueError(
            f"backend has inner_compile={inner_compile!r}, which is not callable; pass a function such as"
            " torch._inductor.compile_fx.compile_fx_inner"
        )
    return functools.partial(_compile_with_inductor, compiler, inner_compile, patches or {})


def _compile_with_inductor(
    compile_fx: Callable[..., Any],
    inner_compile: Callable[..., Any],
    config_patches: dict[str, Any],
    gm: fx.GraphModule,
    inputs: list[Any],
    edit: GraphEdit,
) -> Callable[..., Any]:
    import torch._inductor.config as inductor_config

    name = "post_grad_custom_post_pass"
    theirs = config_patches.get(name, getattr(inductor_config, name))
    patches = {**order_keeping_settings(), **config_patches, name: _with_cache_key(theirs, edit.cache_key)}
    with without_wrong_donations(gm):
        return compile_fx(gm, inputs, inner_compile=_edited(inner_compile, edit), config_patches=patches)


def _compile_with_aot_eager(
    aot_eager: Any, run_as_it_is: Any, gm: fx.GraphModule, inputs: list[Any], edit: GraphEdit
) -> Callable[..., Any]:
    def run_forward(forward: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if edit.forward is not None:
            edit.forward(forward)
        return run_as_it_is(forward, inputs)

    def run_backward(backward: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        edit.backward(backward, False)
        return run_as_it_is(backward, inputs)

    return aot_eager(gm, inputs, fw_compiler=run_forward, bw_compiler=run_backward)


def _edited(inner_compile: Callable[..., Any], edit: GraphEdit) -> Callable[..., Any]:
    def compile_graph(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_backward"):
            edit.backward(gm, True)
        elif edit.forward is not None:
            edit.forward(gm)
        return inner_compile(gm, inputs, **kwargs)

    return compile_graph


def _with_cache_key(theirs: Any, key: str) -> Any:
    """The user's passes, with a key that distinguishes edits in the caches of inductor and AOTAutograd.

    A key in the backward graph would be too late: AOTAutograd's cache is asked before there is one, and would return
    the backward that plain torch.compile made of the same model (seen).
    """
    from torch._inductor import custom_graph_pass

    class CacheKey(custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            if not takes_several and theirs is not None:
                theirs(graph)

        def uuid(self) -> Any:
            if takes_several or theirs is None:
                return key
            # None, so that nothing is cached, if the user's pass has no key.
            their_key = theirs.uuid() if isinstance(theirs, custom_graph_pass.CustomGraphPass) else None
            return None if their_key is None else (key, their_key)

    # torch 2.13 takes several passes here, earlier versions one.
    takes_several = hasattr(custom_graph_pass, "get_custom_graph_passes")
    if theirs is None or not takes_several:
        return CacheKey()
    return (*custom_graph_pass.get_custom_graph_passes(theirs), CacheKey())


def inputs_of_gradients(backward: fx.GraphModule) -> list[int | None]:
    """For each output of a backward graph, the position of the Dynamo graph's input whose gradient it is, or None."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    described = backward.graph.output_node().meta.get("desc") or ()
    return [
        output.grad_of.idx if isinstance(output, GradAOTOutput) and isinstance(output.grad_of, PlainAOTInput) else None
        for output in described
    ]


def positions_of_inputs(forward: fx.GraphModule) -> list[int | None]:
    """For each input of a forward graph, its position among the Dynamo graph's inputs, or None."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    described = (node.meta.get("desc") for node in forward.graph.find_nodes(op="placeholder"))
    return [of.idx if isinstance(of, PlainAOTInput) else None for of in described]


_LOSES_SIZES_OF_VIEWS = torch.__version__ < "2.14"


def without_wrong_cache_entries(gm: fx.GraphModule) -> AbstractContextManager[Any]:
    """Compile a graph without AOTAutograd's cache if the cache might answer wrongly.

    Source: ``aot_module_simplified`` of torch 2.13 (_functorch/aot_autograd.py), which asks for these settings first.
    """
    import torch._functorch.config as functorch_config

    varies = any(_depends_on_a_float(value) for node in gm.graph.nodes for value in _values(node))
    if not varies and not (_LOSES_SIZES_OF_VIEWS and _has_outputs_that_share_memory(gm)):
        return functorch_config.patch()
    return functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False)


def _depends_on_a_float(value: Any) -> bool:
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return isinstance(value, SymFloat) or any(symbol_is_type(symbol, SymT.FLOAT) for symbol in free_symbols(value))


def _has_outputs_that_share_memory(gm: fx.GraphModule) -> bool:
    tensors = (value for node in gm.graph.output_node().all_input_nodes for value in _values(node))
    keys = [storage_key(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
    known = [key for key in keys if key is not None]
    return len(set(known)) < len(known)


def _values(node: fx.Node) -> Iterator[Any]:
    for value in pytree.tree_leaves(node.meta.get("example_value")):
        if isinstance(value, Tensor | SymInt | SymFloat | SymBool):
            yield value
