"""Flatten and unflatten in plain torch operations: what every other implementation has to agree with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def scale_into(sources: Sequence[Tensor], destinations: Sequence[Tensor], scale: float) -> None:
    """Write ``sources[i] * scale`` into ``destinations[i]``, casting; where both are one memory, scale in place."""
    with torch.no_grad():
        for source, destination in zip(sources, destinations, strict=True):
            if scale != 1.0:
                # One pass over memory, where copying and then scaling the flat buffer would take two.
                torch.mul(source, scale, out=destination)
            elif source.data_ptr() != destination.data_ptr():
                destination.copy_(source)
