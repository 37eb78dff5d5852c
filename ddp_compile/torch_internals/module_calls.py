"""Calls of modules: by whom code is being run."""

from __future__ import annotations

from types import CodeType

import torch
from torch.nn.parallel import DistributedDataParallel


def is_module_call(code: CodeType) -> bool:
    """Whether a frame of this code is the call of a module, which is its ``self``; compiled ones have it as well."""
    return code is torch.nn.Module._call_impl.__code__


def active_ddp() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is under way; with Dynamo's "python_reducer" it does not say."""
    return DistributedDataParallel._active_ddp_module
