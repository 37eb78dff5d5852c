"""What reads tensors and tells no ``__torch_function__``.

Note [Hidden readers]
The transforms of torch.func wrap their inputs in C++. Code that torch.compile has made is guarded by the classes of its
parameters, so a class that waits would be traced, or compiled for again and again. ``torch.jit.trace`` notes the lines
of Python by which operators were called, and ``Parameter(...)`` asks for the class before and after it reads. So each
of these is told of when it begins, in the one function of torch that all of its kind pass.

The functions are replaced for good, not for the time in which somebody wants to know: two threads, or somebody else who
replaces them, could put them back in the wrong order. Dynamo traces none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn import Parameter


@functools.cache  # once for each pair
def watch_hidden_readers(begins: Callable[[], None], reads: Callable[..., None]) -> None:
    """From now on, call functions before what reads tensors without a ``__torch_function__``; for good, by any thread.

    Args:
        begins: Called where nobody can say which are read: by transforms of torch.func, compiled code, torch.jit.trace.
        reads: Called with what is read, by ``Parameter(...)``.
    """
    import torch._dynamo.eval_frame as eval_frame
    import torch._functorch.eager_transforms as eager_transforms
    import torch._functorch.vmap as vmap
    import torch.jit._trace as jit_trace

    functions: tuple[tuple[Any, Any], ...] = (
        (eager_transforms, eager_transforms._grad_increment_nesting),  # type: ignore[attr-defined]  # grad, vjp, jacrev
        (eager_transforms, eager_transforms._jvp_increment_nesting),  # type: ignore[attr-defined]  # jvp, jacfwd
        (eager_transforms, eager_transforms._func_increment_nesting),  # type: ignore[attr-defined]  # functionalize
        (vmap, vmap._vmap_increment_nesting),  # type: ignore[attr-defined]
        (jit_trace, jit_trace._create_interpreter_name_lookup_fn),  # of modules and of functions
    )
    for owner, function in functions:
        setattr(owner, function.__name__, _behind(begins, function))
    of_stance = eval_frame._callback_from_stance

    @functools.wraps(of_stance)
    def callback_from_stance(callback: Any) -> Any:
        if callback is not None:  # None is torch.compiler.disable, in whose code nothing is hidden
            begins()
        return of_stance(callback)

    eval_frame._callback_from_stance = callback_from_stance
    new = Parameter.__new__

    @functools.wraps(new)
    def new_parameter(cls: Any, *args: Any, **kwargs: Any) -> Any:
        reads(args, kwargs)
        return new(cls, *args, **kwargs)

    Parameter.__new__ = staticmethod(new_parameter)  # type: ignore[method-assign]


def _behind(begins: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        begins()
        return function(*args, **kwargs)

    return told
