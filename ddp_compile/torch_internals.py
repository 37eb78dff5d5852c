"""Every private torch name this package relies on, each with the versions it was tried on.

Nothing else in the package may import from a torch module that starts with an underscore; a test guards it.
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # the submodules of torch._dynamo are not imported by torch itself
from torch import Tensor, fx

# torch 2.13.0: all names below. torch 2.11.0: read in its sources only, where noted.

#: (compiler function) -> called with a graph and its example inputs, returns what runs in the graph's place.
InnerBackend = Callable[..., Callable[..., Any]]


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
    # Inductor looks donated buffers up by the placeholder numbers of the subgraph it is in (graph.py of torch 2.13), so
    # the backward of a partition with a nested_compile_region could overwrite one of its outputs (seen).
    import torch._functorch.config as functorch_config

    donate = functorch_config.donated_buffer and not _calls_subgraphs(partition)
    with torch._guards.tracing(inner), functorch_config.patch(donated_buffer=donate):
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
