"""Flatten and unflatten in plain torch operations: what every other implementation has to agree with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten_into_views(tensors: Sequence[Tensor], views: Sequence[Tensor], scale: float) -> None:
    """Write ``tensors[i] * scale`` into ``views[i]``; a tensor that already lies in its view is scaled in place."""
    with torch.no_grad():
        if scale != 1.0:
            # One pass over memory for each tensor, where copying and then scaling the flat buffer would take two.
            for tensor, view in zip(tensors, views, strict=True):
                torch.mul(tensor, scale, out=view)
            return
        moved = [(t, v) for t, v in zip(tensors, views, strict=True) if t.data_ptr() != v.data_ptr()]
        if moved:
            torch._foreach_copy_([view for _, view in moved], [tensor for tensor, _ in moved])


def unflatten_from_views(views: Sequence[Tensor], tensors: Sequence[Tensor], scale: float) -> None:
    """Write ``views[i] * scale`` into ``tensors[i]``."""
    flatten_into_views(views, tensors, scale)
