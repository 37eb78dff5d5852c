"""Fused flatten-and-scale between a list of tensors and one flat buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_compile.kernels import reference


class FlattenPlan:
    """Where each tensor of one bucket lies in its flat buffer; made once, used every step.

    Args:
        views: One view into ``flat`` for each tensor, of the tensor's shape and strides.
        flat: One-dimensional buffer that holds all of them. The plan keeps it alive, the caller owns it.
    """

    def __init__(self, views: Sequence[Tensor], flat: Tensor) -> None:
        self.views = tuple(views)
        self.flat = flat

    @classmethod
    def for_bucket(cls, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int] | None = None) -> FlattenPlan:
        """The plan for tensors of these shapes and strides.

        Args:
            tensors: Tensors of any shape on the device of ``flat``. Only shape and strides matter, not the values.
            flat: One-dimensional contiguous buffer of a floating dtype.
            offsets: Where each tensor starts, in elements of ``flat``; packed without gaps when None.

        Raises:
            ValueError: Devices differ, ``flat`` is not one-dimensional and contiguous, or a tensor does not fit.
        """
        if offsets is None:
            ends = torch.tensor([0] + [tensor.numel() for tensor in tensors]).cumsum(0).tolist()
            offsets = ends[:-1]
        _check_fit(tensors, flat, offsets)
        return cls([_view_like(tensor, flat, offset) for tensor, offset in zip(tensors, offsets, strict=True)], flat)

    def flatten(self, tensors: Sequence[Tensor], scale: float) -> None:
        """Write each tensor times ``scale`` to its place; a tensor that lies there already is scaled in place."""
        reference.scale_into(tensors, self.views, scale)

    def unflatten(self, tensors: Sequence[Tensor], scale: float = 1.0) -> None:
        """Write each tensor's place in the flat buffer, times ``scale``, into the tensor."""
        reference.scale_into(self.views, tensors, scale)


def flatten_scale(
    tensors: Sequence[Tensor], flat: Tensor, scale: float, *, offsets: Sequence[int] | None = None
) -> None:
    """Write ``tensors * scale`` into ``flat``, casting to its dtype.

    Args:
        tensors: Tensors of any shape on the device of ``flat``.
        flat: One-dimensional contiguous buffer of a floating dtype. Gaps between the tensors are left alone.
        scale: Factor for every element.
        offsets: Where each tensor starts, in elements of ``flat``; packed without gaps when None.

    Raises:
        ValueError: As `FlattenPlan.for_bucket`.
    """
    FlattenPlan.for_bucket(tensors, flat, offsets).flatten(tensors, scale)


def unflatten(
    flat: Tensor, tensors: Sequence[Tensor], scale: float = 1.0, *, offsets: Sequence[int] | None = None
) -> None:
    """Write ``flat * scale`` back into the tensors, casting to their dtype; the inverse of `flatten_scale`.

    Raises:
        ValueError: As `FlattenPlan.for_bucket`.
    """
    FlattenPlan.for_bucket(tensors, flat, offsets).unflatten(tensors, scale)


def _check_fit(tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int]) -> None:
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(f"flat has shape {tuple(flat.shape)}, strides {flat.stride()}; pass a contiguous 1-d tensor")
    if len(offsets) != len(tensors):
        raise ValueError(f"{len(offsets)} offsets were given for {len(tensors)} tensors; give one for each")
    for i, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        if tensor.device != flat.device:
            raise ValueError(f"tensor {i} is on {tensor.device} but flat is on {flat.device}; move one of them")
        if offset < 0 or offset + tensor.numel() > flat.numel():
            raise ValueError(
                f"tensor {i} with {tensor.numel()} elements at offset {offset} does not fit into flat with"
                f" {flat.numel()} elements"
            )


def _view_like(tensor: Tensor, flat: Tensor, offset: int) -> Tensor:
    """A view at ``offset`` with the tensor's own strides where those fill its elements without gaps.

    AccumulateGrad keeps a gradient whose strides equal the parameter's without a copy, so a channels_last weight gets a
    channels_last view.
    """
    is_dense = is_non_overlapping_and_dense(tensor)
    strides = tensor.stride() if is_dense else torch.empty(tensor.shape, device="meta").stride()
    # Not made by a view operation, so that autograd lets users call .grad.detach_().
    view = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return view.set_(flat.untyped_storage(), flat.storage_offset() + offset, tensor.shape, strides)


def is_non_overlapping_and_dense(tensor: Tensor) -> bool:
    """Whether some order of the dimensions makes the tensor contiguous."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
