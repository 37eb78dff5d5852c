"""Calls of modules: by whom code is being run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def is_module_call(code: CodeType) -> bool:
    """Whether a frame of this code is the call of a module, which is its ``self``; compiled ones have it as well."""
    return code is torch.nn.Module._call_impl.__code__


def compiled_call_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What ``module.compile()`` has put in the place of the module's call; copies and pickles leave it out."""
    return module._compiled_call_impl


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Put something in the place of the call of one module, inside of a ``__call__`` of its class; None for nothing.

    Args:
        module: The module.
        call: Called with the arguments of the module's call.
    """
    module.__dict__.pop("_compiled_call_impl", None)
    if call is not None:
        module._compiled_call_impl = call


def active_ddp() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is under way; with Dynamo's "python_reducer" it does not say."""
    return DistributedDataParallel._active_ddp_module


def inside_optimizer_step() -> bool:
    """Whether an optimizer's step is under way in this thread: its closure is running, for example."""
    wrap: Any = torch.optim.Optimizer.profile_hook_step  # what every class's own step is wrapped by
    wrapper = wrap(wrap).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is wrapper:
            return True
        frame = frame.f_back
    return False
