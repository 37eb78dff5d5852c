"""Dynamo: backends, logs, frames, recompiles, and the context of a compilation.

Functions import Dynamo when they are called: that takes longer than importing torch, and a program that imports
ddp_compile may never compile.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import fx
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ddp_compile.torch_internals.graph_breaks import tell_when_broken

#: In graphs of torch 2.11, the gradient of an autograd.Function that communicates is zero; later versions break the
#: graph there.
_LOSES_GRADIENTS_OF_COLLECTIVES = torch.__version__ < "2.12"

#: (graph, example inputs) -> the compiled function.
InnerBackend = Callable[..., Callable[..., Any]]


def graphs_log() -> logging.Logger:
    """The logger that ``TORCH_LOGS="ddp_graphs"`` turns on.

    torch does not register artifact names of other packages, and gives handlers only to registered loggers. So the
    dumps go to the logger of torch's own DDPOptimizer.
    """
    from torch._logging._internal import getArtifactLogger

    return getArtifactLogger("torch._dynamo.backends.distributed", "ddp_graphs")


def trace_artifact(name: str, text: Callable[[], str], encoding: Literal["string", "json"] = "string") -> None:
    """Add a file to the ``TORCH_TRACE`` log, which tlparse reads: to the current compilation, if there is one."""
    from torch._logging._internal import trace_structured

    metadata = {"name": name, "encoding": encoding}
    trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=text, expect_trace_id=False)


def inner_backend(
    backend: str | Callable[..., Any], mode: str | None, options: dict[str, Any] | None, dynamic: bool | None
) -> InnerBackend:
    """The function that ``torch.compile`` calls with each graph, given these arguments. Checks mode and options."""
    mode = "default" if mode is None and options is None else mode
    # A copy, since torch.compile pops entries.
    options = dict(options) if options is not None else None
    if backend == "inductor":
        return torch._TorchCompileInductorWrapper(mode, {**order_keeping_settings(), **(options or {})}, dynamic)
    return torch._TorchCompileWrapper(backend, mode, options, dynamic)


#: Inductor's pass "simple_overlap", on by default in nightlies of torch 2.14, moves collectives forward and keeps their
#: order, but does not know the operators that launch buckets.
_KEEP_ORDER = {"aten_distributed_optimizations.enable_simple_overlap": False}


def order_keeping_settings() -> dict[str, Any]:
    """Settings that make inductor keep the order of collectives, except those that the user has changed.

    ``options=`` of ``torch.compile`` override them.
    """
    from torch._inductor import config

    known: Any = config.get_config_copy()
    entries: Any = config._config  # type: ignore[attr-defined]
    # Not ``_is_default``: after a first compilation with options, torch mistakes their old values for the user's.
    return {
        name: value for name, value in _KEEP_ORDER.items() if name in known and known[name] == entries[name].default
    }


def known_modes() -> list[str]:
    """Names that ``mode=`` may have with inductor."""
    from torch._inductor import list_mode_options

    return sorted(list_mode_options())


def traced_call_of(
    cls: type[torch.nn.Module],
    runs_eagerly: Callable[[], None] = lambda: None,
    is_broken: Callable[[torch.nn.Module], None] | None = None,
) -> Callable[..., Any]:
    """A function ``(module, *args, **kwargs)`` that calls a module like its class does, including hooks.

    Dynamo starts at its frame. Since Dynamo traces this file, a root whose forward is torch's own, such as
    ``nn.Sequential``, is compiled like any other.

    If Dynamo leaves the frame to Python, ``runs_eagerly`` is called first. If a graph break in a module's own code
    keeps it out of this frame, ``is_broken`` is called with the module before that code runs.
    """
    # nn.Module.__call__ itself would look for the function of ``module.compile()`` first.
    call = torch.nn.Module._call_impl if cls.__call__ is torch.nn.Module.__call__ else cls.__call__
    inside = call if is_broken is None else tell_when_broken(call, is_broken)

    def call_module(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # not a part of the compiled code
            runs_eagerly()
            return call(module, *args, **kwargs)
        return inside(module, *args, **kwargs)

    # Dynamo stores compiled code on the code object, which all models would share.
    call_module.__code__ = call_module.__code__.replace()
    return call_module


def leaves_calls_to_python() -> bool:
    """Whether Dynamo would leave a call to Python now, and mark its code so that it is never compiled.

    It does so inside a dispatch mode such as FlopCounterMode, a transform of ``torch.func`` and forward-mode AD. Inside
    ``set_stance("force_eager")`` nothing is compiled either.
    """
    import torch._dynamo.eval_frame as eval_frame

    return (
        eval_frame._stance.stance == "force_eager"
        or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(not mode.is_infra_mode() and not getattr(mode, "ignore_compile_internals", bool)() for mode in _modes())
    )


def is_traced(parameter: torch.Tensor) -> bool:
    """Whether a module with this real parameter is traced, by ``torch.export`` for example, or run on fake tensors."""
    return any(mode.is_infra_mode() for mode in _modes()) and not fake_tensor.is_fake(parameter)


def _modes() -> list[Any]:
    return _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []


def is_whole_frame(gm: fx.GraphModule, function: Callable[..., Any]) -> bool:
    """Whether the graph that Dynamo is compiling is a function's whole frame. Called by the backend."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or reason.graph_break:
        return False
    # What follows a graph break has code of its own.
    return InstructionTranslator.current_tx().f_code is function.__code__


def forget_compiled(function: Callable[..., Any]) -> None:
    """Free the code that Dynamo has compiled for a function's frame, but not for functions that it calls.

    Dynamo keeps it for as long as the code object lives, which compiled code itself keeps alive.
    """
    import torch._dynamo

    torch._dynamo.eval_frame.reset_code(function.__code__)  # type: ignore[attr-defined]


_num_isolated_functions = 0


def compile_isolated(
    function: Callable[..., Any],
    *,
    backend: Callable[..., Any],
    fullgraph: bool,
    dynamic: bool | None,
    num_modules: int | None = None,
) -> Callable[..., Any]:
    """``torch.compile`` with its own recompile limit.

    Dynamo guards on the backend, and models of one class share code. So each model adds an entry to one list, and the
    ninth would reach the limit and run eagerly without a warning. torch 2.13 can keep separate lists. In an older torch
    the limits grow with the number of functions compiled here.

    ``num_modules`` is how many modules the function is called with, each of which may need its own graph; None for a
    function of one module.
    """
    import torch._dynamo

    settings = {"backend": backend, "fullgraph": fullgraph, "dynamic": dynamic}
    patches: dict[str, Any] = {}
    if num_modules is not None:
        # Without guards on hooks, code that was compiled for a module without hooks would run for a module with hooks.
        patches["skip_nnmodule_hook_guards"] = False
    if has_isolated_recompiles():
        # None means torch's own setting at the time of a recompile.
        limit = None if num_modules is None else torch._dynamo.config.recompile_limit + num_modules - 1
        compiled = torch.compile(function, isolate_recompiles=True, recompile_limit=limit, **settings)  # type: ignore[call-overload]
        return _patched(_after_tracing(compiled), lambda: patches) if patches else _after_tracing(compiled)
    compiled = _after_tracing(torch.compile(function, **settings))  # type: ignore[call-overload]
    global _num_isolated_functions
    _num_isolated_functions += num_modules or 1
    limits = ("recompile_limit", "accumulated_recompile_limit")

    def patches_now() -> dict[str, Any]:
        grown = {name: getattr(torch._dynamo.config, name) * _num_isolated_functions for name in limits}
        return patches | grown

    return _patched(compiled, patches_now)


def _patched(compiled: Callable[..., Any], patches: Callable[[], dict[str, Any]]) -> Callable[..., Any]:
    """Make compiled code run, and recompile, with these settings of Dynamo."""
    import torch._dynamo

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(patches()):
            return compiled(*args, **kwargs)

    return call


def _after_tracing(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Make calls wait while another thread traces a graph and so holds Dynamo's lock.

    Up to torch 2.13 all threads share the flag for a graph being traced, and Dynamo refuses calls while it is set
    ("symbolically trace a dynamo-optimized function").
    """
    import torch._dynamo

    if not hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag"):
        return compiled

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.fx._symbolic_trace._is_fx_tracing_flag:
            with torch._dynamo.convert_frame.compile_lock:
                pass
        return compiled(*args, **kwargs)

    return call


def loses_gradients_of_collectives(gm: fx.GraphModule) -> bool:
    """Whether this torch computes zeros for gradients that pass through a collective of the graph."""
    if not _LOSES_GRADIENTS_OF_COLLECTIVES:
        return False
    bodies = [body for body in gm.children() if isinstance(body, fx.GraphModule)]
    return any(str(node.target).startswith("_c10d_functional") for body in bodies for node in body.graph.nodes)


def has_isolated_recompiles() -> bool:
    """Whether ``torch.compile`` takes ``isolate_recompiles`` (torch 2.13)."""
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


def watch_compilations(begins: Callable[[str], None], ends: Callable[[], None]) -> Callable[[], None]:
    """Call two functions around everything that torch compiles: frames, backwards compiled late, CUDA graphs.

    The first one gets the number of the compilation, "0/1" for example. Returns a function that unregisters both, as
    ``torch._dynamo.reset()`` does.
    """
    import torch._dynamo

    handler = torch._dynamo.callback.callback_handler
    begins_with_arguments = handler.register_start_callback(lambda arguments: begins(str(arguments.compile_id)))
    ends_with_arguments = handler.register_end_callback(lambda _arguments: ends())

    def stop() -> None:
        if begins_with_arguments in handler.start_callbacks:
            handler.remove_start_callback(begins_with_arguments)
        if ends_with_arguments in handler.end_callbacks:
            handler.remove_end_callback(ends_with_arguments)

    return stop


def is_request_to_dynamo(error: BaseException) -> bool:
    """Whether a backend's exception asks Dynamo to trace the frame again, or to leave it to Python."""
    import torch._dynamo

    # call_user_compiler of torch 2.13 lets these through; for any other one Dynamo raises BackendCompilerFailed.
    return isinstance(error, torch._dynamo.exc.TensorifyScalarRestartAnalysis | torch._dynamo.exc.SkipFrame)


def compiled_autograd_is_on() -> bool:
    """Whether Dynamo traces backwards, which it does with AOTAutograd's graphs without our edit."""
    import torch._dynamo.compiled_autograd as compiled_autograd

    return bool(torch._dynamo.config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


def without_wrong_donations(gm: fx.GraphModule) -> AbstractContextManager[Any]:
    """Compile a graph without donated buffers if inductor would donate wrong ones.

    Inductor looks them up by the placeholder numbers of the subgraph that it is in (graph.py of torch 2.13), so the
    backward of a graph with a nested_compile_region could overwrite an output of the forward (seen).
    """
    import torch._functorch.config as functorch_config

    calls_subgraphs = any(
        "invoke_subgraph" in str(node.target) for node in gm.graph.nodes if node.op == "call_function"
    )
    return functorch_config.patch(donated_buffer=functorch_config.donated_buffer and not calls_subgraphs)


@contextmanager
def partition_tracing_context(fake_mode: Any, partition: fx.GraphModule) -> Iterator[None]:
    """Compile one partition under its own tracing context.

    With a shared one, the backward of an early partition, which is compiled lazily, would read the forward metadata of
    the last partition, and inductor would donate the wrong buffers (seen with torch 2.13).
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
    with torch._guards.tracing(inner), without_wrong_donations(partition):
        yield


def copy_dynamo_metadata(source: fx.GraphModule, partition: fx.GraphModule) -> None:
    """Copy what AOTAutograd reads from a Dynamo graph: the Python value that each placeholder came from."""
    partition.meta = source.meta
    if hasattr(source, "_param_name_to_source"):
        partition._param_name_to_source = source._param_name_to_source
    sources = {node.name: getattr(node, "_dynamo_source", None) for node in source.graph.find_nodes(op="placeholder")}
    for node in partition.graph.find_nodes(op="placeholder"):
        # An intermediate value of the whole graph has no Python source.
        node._dynamo_source = sources.get(str(node.target))
