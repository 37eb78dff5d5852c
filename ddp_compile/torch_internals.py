"""Every private torch name this package relies on, each with the versions it was tried on.

Nothing else in the package may import from a torch module that starts with an underscore; a test guards it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch._dynamo  # the submodules of torch._dynamo are not imported by torch itself
from torch import Tensor, fx

# torch 2.13.0: all names below. torch 2.11.0: read in its sources only, where noted.

#: (compiler function) -> called with a graph and its example inputs, returns what runs in the graph's place.
InnerBackend = Callable[..., Callable[..., Any]]

#: Called with inductor's error and the backward graph it failed at; raises if that must not run eagerly.
AcceptFailure = Callable[[Exception, fx.GraphModule], None]


def graphs_log() -> logging.Logger:
    """The logger that ``TORCH_LOGS="ddp_graphs"`` turns on.

    torch refuses artifact names of ours and gives handlers only to the loggers of modules it registered, so the dumps
    go to the logger of torch's own DDPOptimizer, whose place they take.
    """
    from torch._logging._internal import getArtifactLogger

    return getArtifactLogger("torch._dynamo.backends.distributed", "ddp_graphs")


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Put a text file beside the graphs of the current compile in the ``TORCH_TRACE`` log (read by tlparse)."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


def known_backends() -> list[str]:
    """Names that ``backend=`` may have, experimental and debugging ones included."""
    return sorted(torch._dynamo.list_backends(exclude_tags=()))


def inner_backend(
    backend: str | Callable[..., Any],
    mode: str | None,
    options: dict[str, Any] | None,
    dynamic: bool | None,
) -> InnerBackend:
    """What ``torch.compile`` would call with each graph for these arguments; checks mode and options."""
    mode = "default" if mode is None and options is None else mode
    # torch.compile pops what it uses itself from the dict; work on a copy, the caller's stays as it is.
    options = dict(options) if options is not None else None
    if backend == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, dynamic)
    return torch._TorchCompileWrapper(backend, mode, options, dynamic)


def compile_with_eager_backward(
    inner: InnerBackend,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    accept_failure: AcceptFailure,
) -> Callable[..., Any]:
    """Compile a graph; where inductor fails to compile its backward, that runs eagerly.

    AOTAutograd makes the backward graph with the forward one, and inductor compiles it when it is first needed: inside
    of a backward pass. By then the forward has saved what this backward graph takes, so only that graph can go on.

    Args:
        inner: What `inner_backend` returned.
        gm: The graph; the compiler may change it.
        example_inputs: One entry for each placeholder.
        accept_failure: Called with inductor's error and the backward graph; raises if that must not run eagerly.

    Returns:
        The compiled function.
    """
    if not isinstance(inner, torch._TorchCompileInductorWrapper):
        return inner(gm, list(example_inputs))
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(
        gm, list(example_inputs), inner_compile=_or_eagerly(accept_failure), config_patches=dict(inner.config)
    )
    return compiled


def _or_eagerly(accept_failure: AcceptFailure) -> Callable[..., Any]:
    """Inductor's compiler of one graph; a backward that it fails at, and that may run eagerly, is what runs."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.compile_fx import compile_fx_inner

    def compile_forward_or_backward(graph: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        if not settings.get("is_backward", False):
            return compile_fx_inner(graph, inputs, **settings)
        uncompiled = fx.GraphModule(graph, copy.deepcopy(graph.graph))  # inductor's passes rewrite the graph
        try:
            return compile_fx_inner(graph, inputs, **settings)
        except Exception as error:
            accept_failure(error, uncompiled)
            return make_boxed_func(uncompiled.forward)

    return compile_forward_or_backward


def is_request_to_dynamo(error: BaseException) -> bool:
    """Whether a backend's exception asks Dynamo to trace the frame again, or to leave it to Python."""
    # Those that call_user_compiler of torch 2.13 lets through; for any other one Dynamo raises BackendCompilerFailed.
    return isinstance(error, torch._dynamo.exc.TensorifyScalarRestartAnalysis | torch._dynamo.exc.SkipFrame)


def repeats_random_numbers(backward: fx.GraphModule) -> bool:
    """Whether one of inductor's backward graphs draws random numbers from the forward's seed.

    The eager implementation of these operators ignores the seed (_inductor/inductor_prims.py of torch 2.13), so that a
    dropout that a checkpoint computes again would drop others than the forward did.
    """
    names = ("inductor_rand", "rngprims")
    return any(name in str(node.target) for node in backward.graph.nodes for name in names)


def known_modes() -> list[str]:
    """Names that ``mode=`` may have with inductor."""
    from torch._inductor import list_mode_options

    return sorted(list_mode_options())


def traced_call_of(cls: type[torch.nn.Module]) -> Callable[..., Any]:
    """A function ``(module, *args, **kwargs)`` that calls a module as its class does, hooks included.

    It is the frame Dynamo starts from. Dynamo traces this file, so a root whose forward is torch's own, such as
    ``nn.Sequential``, is compiled like any other.
    """
    # nn.Module.__call__ itself would look for the function of ``module.compile()`` first.
    call = torch.nn.Module._call_impl if cls.__call__ is torch.nn.Module.__call__ else cls.__call__

    def call_module(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return call(module, *args, **kwargs)

    return call_module


_num_isolated_functions = 0


def compile_isolated(
    function: Callable[..., Any], *, backend: Callable[..., Any], fullgraph: bool, dynamic: bool | None
) -> Callable[..., Any]:
    """``torch.compile`` with a recompile limit of its own.

    Dynamo guards on the backend, and the models of one class share code, so each model adds an entry to one list; the
    ninth would hit the limit and run eagerly without a word. torch 2.13 can keep the lists apart. For an older torch
    the limits grow with the number of functions compiled here.
    """
    settings = {"backend": backend, "fullgraph": fullgraph, "dynamic": dynamic}
    if has_isolated_recompiles():
        return torch.compile(function, isolate_recompiles=True, **settings)  # type: ignore[call-overload]
    compiled = torch.compile(function, **settings)  # type: ignore[call-overload]
    global _num_isolated_functions
    _num_isolated_functions += 1

    def call(*args: Any, **kwargs: Any) -> Any:
        config = torch._dynamo.config
        limits = {
            name: getattr(config, name) * _num_isolated_functions
            for name in ("recompile_limit", "accumulated_recompile_limit")
        }
        with config.patch(limits):
            return compiled(*args, **kwargs)

    return call


def has_isolated_recompiles() -> bool:
    """Whether ``torch.compile`` takes ``isolate_recompiles`` (torch 2.13)."""
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


def broadcast_coalesced(
    process_group: Any, tensors: Sequence[Tensor], chunk_bytes: int, src_rank_in_group: int
) -> None:
    """Broadcast tensors of any dtypes in chunks of about ``chunk_bytes``, one collective for each dtype and chunk."""
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter
    from torch.distributed import _broadcast_coalesced  # type: ignore[attr-defined]

    # Autograd takes the new values for the old ones: a second forward before the backward of a first one must not make
    # that backward fail because a buffer has been broadcast in between.
    with _unsafe_preserve_version_counter(tuple(tensors)):
        _broadcast_coalesced(process_group, list(tensors), chunk_bytes, src_rank_in_group)


def group_timeout(process_group: Any, device: torch.device) -> timedelta:
    """How long a collective of tensors on this device may take; torch's default where the backend does not say."""
    try:
        return process_group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):  # a process group, or a backend, that is written in Python
        return torch.distributed.constants.default_pg_timeout


def watch_compilations(begins: Callable[[str], None], ends: Callable[[], None]) -> Callable[[], None]:
    """Call two functions around everything that torch compiles: frames, backwards compiled late, CUDA graphs.

    Args:
        begins: Called with the number of the compilation, "0/1" for example.
        ends: Called when it is over, or has failed.

    Returns:
        What ends the watching. ``torch._dynamo.reset()`` ends it too.
    """
    handler = torch._dynamo.callback.callback_handler
    begins_with_arguments = handler.register_start_callback(lambda arguments: begins(str(arguments.compile_id)))
    ends_with_arguments = handler.register_end_callback(lambda _arguments: ends())

    def stop() -> None:
        if begins_with_arguments in handler.start_callbacks:
            handler.remove_start_callback(begins_with_arguments)
        if ends_with_arguments in handler.end_callbacks:
            handler.remove_end_callback(ends_with_arguments)

    return stop


def current_graph_task_id() -> int:
    """Identity of the backward pass this thread is in; a reentrant checkpoint opens passes inside passes. -1: none."""
    return torch._C._current_graph_task_id()


def is_inside_backward() -> bool:
    """Whether the backward pass that is ending runs inside another one; asked in an engine callback."""
    return torch._C._current_autograd_node() is not None


def post_accumulate_grad_hooks(parameter: Tensor) -> OrderedDict[int, Any]:
    """The hooks of a parameter that has had one, by number, in the order in which they run: torch's own dict."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    return hooks


def run_last(hooks: Sequence[OrderedDict[int, Any]], ours: Sequence[Any]) -> None:
    """Let our hook run after those that were registered later.

    Args:
        hooks: What `post_accumulate_grad_hooks` gave for each parameter.
        ours: The handle of our hook on each parameter.
    """
    if max(map(len, hooks), default=0) <= 1:
        return  # nobody has hooks but we
    for present, hook in zip(hooks, ours, strict=True):
        if next(reversed(present)) != hook.id:
            # Not move_to_end: torch reads the order of the dict underneath, which that leaves as it is.
            present[hook.id] = present.pop(hook.id)


def accumulator_of(parameter: Tensor) -> Any:
    """The autograd node that accumulates into a parameter's ``.grad``; it stays the same while somebody holds it."""
    return torch.autograd.graph.get_gradient_edge(parameter).node


def are_going_to_run(nodes: Sequence[Any]) -> bool:
    """Whether the backward pass that this thread is in will run all of these nodes.

    It will not where gradients are asked for by ``torch.autograd.grad`` or ``backward(inputs=...)``.
    """
    try:
        return all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # torch gives no answer for a leaf whose gradient is to be returned
        return False


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether ``register_hook`` was called for a parameter, or somebody beside us awaits its ``.grad``."""
    return bool(parameter._backward_hooks) or len(parameter._post_accumulate_grad_hooks or ()) > 1


def profiled_range(name: str) -> AbstractContextManager[Any]:
    """A range of this name in the profiler's trace; free of cost while no profiler runs."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return nullcontext()


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the innermost running backward pass has ended without an exception."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def fake_mode_of(example_inputs: Sequence[Any]) -> Any:
    """The fake tensor mode the current compile uses, or a new one outside of Dynamo."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    return detect_fake_mode(example_inputs) or FakeTensorMode()


def to_fake(value: Any, fake_mode: Any) -> Any:
    """A fake tensor of ``fake_mode`` for a real one, with the symbolic sizes Dynamo chose; other values unchanged."""
    from torch._dynamo.utils import to_fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
        return to_fake_tensor(value, fake_mode)
    return value


def fake_like(example: Any, fake_mode: Any) -> Any:
    """A new fake tensor with the size, strides, dtype, device and requires_grad of an ``example_value``.

    The example values of Dynamo's graph belong to an earlier fake mode that shares the shape environment, so their
    symbolic sizes stay valid. Running the partition again instead would make new unbacked symbols.
    """
    if not isinstance(example, Tensor):
        return example
    with fake_mode:
        fake = torch.empty_strided(example.size(), example.stride(), dtype=example.dtype, device=example.device)
    return fake.requires_grad_(example.requires_grad)


def call_with_fakes(operator: Callable[..., Any], *arguments: Any) -> Any:
    """What an operator returns for fake tensors, in their own fake mode."""
    with fake_mode_of(arguments):
        return operator(*arguments)


def num_bytes_hint(value: Tensor) -> int:
    """Bytes of a (fake) tensor's elements; for symbolic sizes, those of the inputs the graph was traced with."""
    numel: Any = value.numel()
    if isinstance(numel, torch.SymInt):
        numel = numel.node.hint or 0  # None for a size that depends on data
    return int(numel) * value.element_size()


def is_plain_tensor(value: Tensor) -> bool:
    """A strided tensor (real or fake) `fake_like` can stand in for: no subclass, no lazy conjugation or negation."""
    from torch._subclasses.fake_tensor import FakeTensor

    return (
        type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
        and value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
    )


def free_symbols(value: Any) -> list[Any]:
    """The sympy symbols in the sizes, strides and storage offset of a tensor, or in a SymInt, in a stable order."""
    from torch.fx.experimental.symbolic_shapes import free_symbols as symbols_of

    return sorted(symbols_of(value), key=str)


def symbol_bound_by(value: Any) -> Any | None:
    """The sympy symbol that a SymInt is, or None where it is an expression or no SymInt."""
    import sympy  # type: ignore[import-untyped]

    if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
        return value.node.expr
    return None


def storage_key(tensor: Tensor) -> int | None:
    """Equal for two (fake) tensors exactly where they share storage; None for tensors that have none of their own."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or not torch._C._has_storage(tensor):
        return None
    return tensor.untyped_storage()._cdata


def allows_same_attention_kernels(backends: Any) -> bool:
    """Whether ``sdpa_kernel`` with these backends changes nothing now."""
    from torch.nn.attention import _cur_sdpa_kernel_backends

    return set(backends) == set(_cur_sdpa_kernel_backends())


def _calls_subgraphs(gm: fx.GraphModule) -> bool:
    return any("invoke_subgraph" in str(node.target) for node in gm.graph.nodes if node.op == "call_function")


def right_donations(gm: fx.GraphModule) -> AbstractContextManager[Any]:
    """Compile a graph without donated buffers where inductor would donate wrong ones.

    It looks them up by the placeholder numbers of the subgraph it is in (graph.py of torch 2.13), so the backward of a
    graph with a nested_compile_region could overwrite an output of the forward (seen).
    """
    import torch._functorch.config as functorch_config

    return functorch_config.patch(donated_buffer=functorch_config.donated_buffer and not _calls_subgraphs(gm))


@contextmanager
def partition_tracing_context(fake_mode: Any, partition: fx.GraphModule) -> Iterator[None]:
    """Compile one partition under a tracing context of its own.

    Under a shared one the backward of an early partition, which is compiled lazily, would read the forward metadata of
    the last partition, and inductor would donate the wrong buffers (seen on torch 2.13).
    """
    import torch._guards

    outer = torch._guards.TracingContext.try_get()
    inner = torch._guards.TracingContext(fake_mode)
    if outer is not None:
        inner.guards_context = outer.guards_context
        inner.module_context = outer.module_context
        inner.global_context = outer.global_context
        inner.params_flat = outer.params_flat
        inner.tensor_to_context = outer.tensor_to_context
    with torch._guards.tracing(inner), right_donations(partition):
        yield


def copy_dynamo_metadata(source: fx.GraphModule, partition: fx.GraphModule) -> None:
    """Give a partition what AOTAutograd reads off a Dynamo graph: which placeholder came from which Python value."""
    partition.meta = source.meta
    if hasattr(source, "_param_name_to_source"):
        partition._param_name_to_source = source._param_name_to_source
    sources = {node.name: getattr(node, "_dynamo_source", None) for node in source.graph.find_nodes(op="placeholder")}
    for node in partition.graph.find_nodes(op="placeholder"):
        # An intermediate value of the whole graph is a placeholder of the partition, with no Python source.
        node._dynamo_source = sources.get(str(node.target))


class BackwardEdit(NamedTuple):
    """A change to the backward of one forward graph.

    Args:
        apply: Called with the graph that AOTAutograd made, before it is compiled; not where a cache has it compiled.
        cache_key: Different for edits that make different graphs, the same in every process for the same edit.
    """

    apply: Callable[[fx.GraphModule], None]
    cache_key: str


#: Like `InnerBackend`, with an edit of the backward.
EditingBackend = Callable[[fx.GraphModule, list[Any], BackwardEdit], Callable[..., Any]]


def editing_backend(inner: InnerBackend, accept_failure: AcceptFailure | None = None) -> EditingBackend | None:
    """A backend that compiles as ``inner`` does and edits backward graphs; None for one that is not known to make any.

    Known are inductor, ``compile_fx`` itself or with an ``inner_compile`` of the user's, ``aot_eager``, and what
    ``torch._dynamo.backends.common.aot_autograd`` returned.

    Args:
        inner: What `inner_backend` returned.
        accept_failure: As for `compile_with_eager_backward`; None raises what inductor raises.

    Raises:
        ValueError: The backend's ``inner_compile`` is not callable.
    """
    from torch._dynamo.backends import common, debugging

    if isinstance(inner, torch._TorchCompileInductorWrapper):
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        compile_inner = compile_fx_inner if accept_failure is None else _or_eagerly(accept_failure)
        return functools.partial(_compile_with_inductor, compile_fx, compile_inner, inner.config)
    compiler: Any = getattr(inner, "compiler_fn", None)
    if isinstance(compiler, common.AotAutograd):
        return functools.partial(_compile_with_aot_autograd, compiler)
    if compiler is debugging.aot_eager:
        return lambda gm, inputs, edit: debugging.aot_eager(
            gm, inputs, bw_compiler=_edited(debugging.boxed_nop, edit, always=True)
        )
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
    edit: BackwardEdit,
) -> Callable[..., Any]:
    import torch._inductor.config as inductor_config

    name = "post_grad_custom_post_pass"
    theirs = config_patches.get(name, getattr(inductor_config, name))
    patches = {**config_patches, name: _with_cache_key(theirs, edit.cache_key)}
    with right_donations(gm):
        return compile_fx(gm, inputs, inner_compile=_edited(inner_compile, edit), config_patches=patches)


def _compile_with_aot_autograd(
    compiler: Any, gm: fx.GraphModule, inputs: list[Any], edit: BackwardEdit
) -> Callable[..., Any]:
    backward_compiler = compiler.kwargs.get("bw_compiler") or compiler.kwargs["fw_compiler"]
    kwargs = {**compiler.kwargs, "bw_compiler": _edited(backward_compiler, edit, always=True)}
    return type(compiler)(**kwargs)(gm, inputs)


def _edited(compiler: Callable[..., Any], edit: BackwardEdit, always: bool = False) -> Callable[..., Any]:
    """The compiler, with the edit before it: of every graph, or of those that inductor says are a backward."""

    def compile_graph(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        if always or kwargs.get("is_backward"):
            edit.apply(gm)
        return compiler(gm, inputs, **kwargs)

    return compile_graph


def _with_cache_key(theirs: Any, key: str) -> Any:
    """Passes that do what the user's do, and let inductor's caches and AOTAutograd's tell edits apart.

    A key on the backward graph alone would not do: AOTAutograd's cache is asked before there is one, and would return
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
            # None, and so nothing is cached, where the user's pass does not say what it is.
            their_key = theirs.uuid() if isinstance(theirs, custom_graph_pass.CustomGraphPass) else None
            return None if their_key is None else (key, their_key)

    # torch 2.13 takes several passes in this place; before, there is one.
    takes_several = hasattr(custom_graph_pass, "get_custom_graph_passes")
    if theirs is None or not takes_several:
        return CacheKey()
    return (*custom_graph_pass.get_custom_graph_passes(theirs), CacheKey())


def compiled_autograd_is_on() -> bool:
    """Whether backwards are traced by Dynamo, which takes the graphs as AOTAutograd made them, without our edit."""
    import torch._dynamo.compiled_autograd as compiled_autograd

    return bool(torch._dynamo.config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


def inputs_of_gradients(backward: fx.GraphModule) -> list[int | None]:
    """For each output of a backward graph, the position of the Dynamo graph's input whose gradient it is, or None.

    AOTAutograd of torch 2.13 writes it on the output node.
    """
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    described = backward.graph.output_node().meta.get("desc") or ()
    return [
        output.grad_of.idx if isinstance(output, GradAOTOutput) and isinstance(output.grad_of, PlainAOTInput) else None
        for output in described
    ]
