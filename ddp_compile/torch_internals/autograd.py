"""The autograd engine: backward passes, nodes and hooks."""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch.distributed import rpc
from torch.utils.hooks import RemovableHandle


@functools.cache
def _skip_all() -> Any:
    from torch._dynamo import types  # imports all of Dynamo

    actions: Any = types  # it has these, but mypy does not see them
    return actions.FrameExecStrategy(actions.FrameAction.SKIP, actions.FrameAction.SKIP)


def never_compile(function: Callable[..., Any]) -> None:
    """Keep Dynamo from compiling a function that the engine calls, and everything that it calls.

    In a training step that is compiled as a whole, Dynamo sees every frame that runs, including those of hooks.
    ``torch.compiler.disable`` would add a wrapper to each call.
    """
    set_code_exec_strategy(getattr(function, "__func__", function).__code__, _skip_all())


def while_alive(method: Callable[..., None]) -> Callable[..., None]:
    """The method for those who would keep it, and its object, forever: Dynamo, parameters and all optimizers."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return call


def current_graph_task_id() -> int:
    """Number of the backward pass that this thread is in, the innermost one of reentrant checkpoints; -1 for none."""
    return torch._C._current_graph_task_id()


def is_inside_backward() -> bool:
    """Whether the backward pass that is ending runs inside another one. Call it in an engine callback."""
    return torch._C._current_autograd_node() is not None


def post_accumulate_grad_hooks(parameter: Tensor) -> OrderedDict[int, Any]:
    """torch's own dict of a parameter's hooks, in the order in which they run. The parameter must have had one."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    return hooks


def with_hooks_of_others(hooks: Sequence[OrderedDict[int, Any]]) -> list[int]:
    """The positions with hooks of others, given the dicts of `post_accumulate_grad_hooks`."""
    if max(map(len, hooks), default=0) <= 1:
        return []
    return [place for place, present in enumerate(hooks) if len(present) > 1]


def run_last(handle: Any) -> None:
    """Make a node's hook run after those that were registered later. Do not call this while the engine runs them."""
    hooks = handle.hooks_dict_ref()
    if hooks is not None and next(reversed(hooks)) != handle.id:
        # Not move_to_end, which does not change the order of the underlying dict that torch reads.
        hooks[handle.id] = hooks.pop(handle.id)


_num_own_hooks = 0


def register_own(register: Callable[[Any], RemovableHandle], hook: Callable[..., Any]) -> RemovableHandle:
    """Register a hook that `num_hooks_of_others` does not count and that Dynamo never compiles."""
    global _num_own_hooks
    never_compile(hook)
    before = RemovableHandle.next_id
    handle = register(hook)
    _num_own_hooks += RemovableHandle.next_id - before
    return handle


def num_hooks_of_others() -> int:
    """How many hooks of any kind others have registered from Python so far."""
    return RemovableHandle.next_id - _num_own_hooks


def accumulator_of(parameter: Tensor) -> Any:
    """The autograd node that accumulates into a parameter's ``.grad``; the same one as long as it is referenced."""
    return torch.autograd.graph.get_gradient_edge(parameter).node


def leaves_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The leaves into which a backward from these tensors would accumulate, once for each gradient that is added up."""
    nodes: list[Any] = []
    seen: set[Any] = set()
    for tensor in tensors:
        if tensor.grad_fn is not None:
            nodes.append(tensor.grad_fn)
        elif tensor.requires_grad:
            yield tensor
    while nodes:
        node = nodes.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable
        elif node not in seen:
            seen.add(node)
            nodes.extend(following for following, _ in node.next_functions if following is not None)


def is_accumulating_into(parameter: Tensor) -> bool:
    """Whether this thread is running the autograd node that accumulates into a parameter's ``.grad``."""
    return getattr(torch._C._current_autograd_node(), "variable", None) is parameter


def are_going_to_run(nodes: Sequence[Any]) -> bool:
    """Whether the backward pass of this thread will run all of these nodes.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` leave some out.
    """
    try:
        return all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # torch refuses to answer for a leaf whose gradient it will return
        return False


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether a parameter has a hook from ``register_hook``, or a post-accumulate hook that is not ours."""
    return bool(parameter._backward_hooks) or len(parameter._post_accumulate_grad_hooks or ()) > 1


def inside_distributed_autograd() -> bool:
    """Whether this thread is in a ``torch.distributed.autograd.context()``, whose backwards leave ``.grad`` alone."""
    if not rpc.is_available() or not torch._C._distributed_rpc._is_current_rpc_agent_set():
        return False
    try:
        torch._C._distributed_autograd._current_context()
    except RuntimeError:  # there is none
        return False
    return True


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the innermost backward pass has ended without an exception. It is never compiled."""
    never_compile(callback)
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def profiled_range(name: str) -> AbstractContextManager[Any]:
    """A range in the profiler's trace. It costs nothing if no profiler runs."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return nullcontext()
