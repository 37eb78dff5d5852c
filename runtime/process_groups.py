"""Process groups of our own, beside the one that a module was given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_compile import torch_internals


def group_of(ranks: Sequence[int], like: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A process group of some ranks, which only they have to ask for.

    Args:
        ranks: Their global ranks.
        like: Has the same backend and timeout.
        device: Where what it sends will be.
    """
    timeout = torch_internals.group_timeout(like, device)
    group = dist.new_group(list(ranks), timeout, dist.get_backend(like), use_local_synchronization=True)
    assert group is not None
    return group
