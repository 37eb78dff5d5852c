"""Calls of modules and of optimizers: the code that is running."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


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


def active_ddp() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is running; unknown with Dynamo's "python_reducer"."""
    return DistributedDataParallel._active_ddp_module


def inside_optimizer_step() -> bool:
    """Whether this thread is inside an optimizer's step, for example in its closure."""
    wrap: Any = torch.optim.Optimizer.profile_hook_step  # wraps the step of every class
    wrapper = wrap(wrap).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is wrapper:
            return True
        frame = frame.f_back
    return False
