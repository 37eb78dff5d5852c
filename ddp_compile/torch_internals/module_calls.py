"""Calls of modules: by whom code is being run."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def is_module_call(code: CodeType) -> bool:
    """Whether a frame of this code is the call of a module, which is its ``self``; compiled ones have it as well."""
    return code is torch.nn.Module._call_impl.__code__


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
