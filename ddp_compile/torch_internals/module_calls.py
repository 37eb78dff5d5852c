"""Calls of modules and of optimizers: the code that is running."""

import sys
from collections.abc import Callable, Iterator
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


def is_disabled_for_dynamo(module: torch.nn.Module) -> bool:
    """Whether a module is TorchScript's, or ``torch.compiler.disable`` was called on it, its class or its forward."""
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
    code = wrap(wrap).__code__
    return any(frame.f_code is code for frame in frames())


def swapped_in() -> set[int]:
    """The ids of the tensors that ``torch.func.functional_call`` has put into modules, in calls that led here."""
    code = stateless._functional_call.__code__  # Note [Frames whose locals are read] in wrappers.py
    calls = (frame for frame in frames() if frame.f_code is code)
    return {id(tensor) for call in calls for tensor in call.f_locals["parameters_and_buffers"].values()}


def only_stands_in(parameter: torch.Tensor) -> bool:
    """Whether what is in a parameter's place was not assigned to it: that must be a parameter.

    ``torch.export`` puts fake tensors there during a call, and torchopt tensors that it has computed.
    """
    return not isinstance(parameter, torch.nn.Parameter) or fake_tensor.is_fake(parameter)


def outside_transforms() -> AbstractContextManager[Any]:
    """A context in which no transform of ``torch.func`` around it is active."""
    return pyfunctorch.temporarily_clear_interpreter_stack()


def frames() -> Iterator[FrameType]:
    """The frames that this thread is inside of, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def takes_grad_scale(optimizer: Any) -> bool:
    """Whether an optimizer's step divides gradients by its attribute ``grad_scale``, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
