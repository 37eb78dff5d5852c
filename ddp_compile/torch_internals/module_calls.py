"""Calls of modules and of optimizers: the code that is running."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any

import torch
from torch._functorch import pyfunctorch
from torch._subclasses import fake_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import stateless


def is_module_call(code: CodeType) -> bool:
    """Whether a frame of this code is the call of its ``self``, a module. Compiled modules have that frame too."""
    return code is torch.nn.Module._call_impl.__code__


def compiled_call_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The function that ``module.compile()`` has set, which copies and pickles leave out."""
    return module._compiled_call_impl


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Replace one module's call, inside any ``__call__`` of its class, by ``call(*args, **kwargs)``; None undoes it."""
    module.__dict__.pop("_compiled_call_impl", None)
    if call is not None:
        module._compiled_call_impl = call


def is_left_to_python(module: torch.nn.Module) -> bool:
    """Whether nothing that a module's call runs may be compiled.

    That is a module of TorchScript, or one that ``torch.compiler.disable`` was called on: on the module, its class or
    its forward.
    """
    from torch._dynamo.eval_frame import DisableContext

    if isinstance(module, torch.jit.ScriptModule) or isinstance(getattr(module, "dynamo_ctx", None), DisableContext):
        return True
    calls = (module.forward, type(module)._call_impl)
    return any(getattr(call, "_torchdynamo_disable_recursive", False) for call in calls)


def active_ddp() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is running; unknown with Dynamo's "python_reducer"."""
    return DistributedDataParallel._active_ddp_module


def inside_optimizer_step() -> bool:
    """Whether this thread is inside an optimizer's step, for example in its closure."""
    wrap: Any = torch.optim.Optimizer.profile_hook_step  # wraps the step of every class
    return _is_running(wrap(wrap).__code__)


def has_swapped_parameters(module: torch.nn.Module) -> bool:
    """Whether other tensors stand in for parameters, for one call as a rule.

    ``torch.func.functional_call`` swaps any tensors in. Others, such as ``torch.export`` and torchopt, swap in fake
    tensors or tensors that are no parameters, which nobody can assign to a module for good.
    """
    parameters = [p for owner in module.modules() for p in owner._parameters.values() if p is not None]
    return any(not isinstance(p, torch.nn.Parameter) or fake_tensor.is_fake(p) for p in parameters) or _is_running(
        stateless._functional_call.__code__
    )


def outside_transforms() -> AbstractContextManager[Any]:
    """A context in which no transform of ``torch.func`` around it is active."""
    return pyfunctorch.temporarily_clear_interpreter_stack()


def _is_running(code: CodeType) -> bool:
    """Whether this thread is inside a function with this code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
