"""Complex gradients in a flat buffer, moved by kernels for real numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_compile.kernels import FlattenPlan, FlattenStats


class RealParts:
    """A `FlattenPlan` for complex tensors: a plan over their real and imaginary parts, which are adjacent in memory.

    Args:
        tensors: Complex tensors, as for `FlattenPlan`.
        flat: One-dimensional contiguous buffer of their dtype.
        offsets: Where each tensor starts, in elements of ``flat``.
    """

    def __init__(self, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int]) -> None:
        parts = torch.view_as_real(flat).view(-1)
        self._plan = FlattenPlan.for_bucket(_real_parts(tensors), parts, [2 * offset for offset in offsets])
        self.views = tuple(torch.view_as_complex(view) for view in self._plan.views)

    def flatten(self, tensors: Sequence[Tensor], scale: float, *, with_stats: bool = False) -> FlattenStats | None:
        """As `FlattenPlan.flatten`."""
        return self._plan.flatten(_real_parts(tensors), scale, with_stats=with_stats)

    def unflatten(self, tensors: Sequence[Tensor]) -> None:
        """As `FlattenPlan.unflatten`."""
        written = [torch.empty_like(tensor) if tensor.is_conj() else tensor for tensor in tensors]
        self._plan.unflatten(_real_parts(written))
        for tensor, result in zip(tensors, written, strict=True):
            if result is not tensor:
                tensor.copy_(result)


def _real_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    # Autograd can defer a conjugation until the values are read. Such a tensor has no view of its parts.
    return [torch.view_as_real(tensor.detach().resolve_conj()) for tensor in tensors]
