"""Complex gradients in a flat buffer, moved by kernels that know real numbers only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_compile.kernels import FlattenPlan, FlattenStats


class RealParts:
    """What a `FlattenPlan` is, for complex tensors: a plan over their real and imaginary parts, which lie side by side.

    Args:
        tensors: Complex tensors, as for `FlattenPlan`.
    """

    def __init__(self, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int]) -> None:
        parts = torch.view_as_real(flat).view(-1)
        self._plan = FlattenPlan.for_bucket(_real_parts(tensors), parts, [2 * offset for offset in offsets])
        self.views = tuple(torch.view_as_complex(view) for view in self._plan.views)

    def flatten(self, tensors: Sequence[Tensor], scale: float, *, with_stats: bool = False) -> FlattenStats | None:
        return self._plan.flatten(_real_parts(tensors), scale, with_stats=with_stats)

    def unflatten(self, tensors: Sequence[Tensor]) -> None:
        written = [torch.empty_like(tensor) if tensor.is_conj() else tensor for tensor in tensors]
        self._plan.unflatten(_real_parts(written))
        for tensor, result in zip(tensors, written, strict=True):
            if result is not tensor:
                tensor.copy_(result)


def _real_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    # Autograd can leave a conjugation to be done when the values are read; such a tensor has no view of its parts.
    return [torch.view_as_real(tensor.detach().resolve_conj()) for tensor in tensors]
