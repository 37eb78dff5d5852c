"""Process groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # the submodules of torch._dynamo are not imported by torch itself
from torch import Tensor


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
