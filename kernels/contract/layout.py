"""Places of tensors in a flat buffer, their strides, and checks."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor


def packed_offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Offsets, in elements, that put the tensors one after another without gaps."""
    return list(accumulate((tensor.numel() for tensor in tensors), initial=0))[:-1]


def place_of(tensor: Tensor, flat: Tensor, offset: int) -> Tensor:
    """A view of ``flat`` at ``offset``, with the tensor's own strides if those leave no gaps.

    AccumulateGrad does not copy a gradient whose strides equal the parameter's, so a channels_last weight gets a
    channels_last view.
    """
    is_dense = is_non_overlapping_and_dense(tensor)
    strides = tensor.stride() if is_dense else torch.empty(tensor.shape, device="meta").stride()
    # Not a view operation: after one, autograd refuses .grad.detach_().
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


def check_flat(flat: Tensor) -> None:
    """Raise ValueError unless ``flat`` is one-dimensional, contiguous and of a floating dtype."""
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(f"flat has shape {tuple(flat.shape)}, strides {flat.stride()}; pass a contiguous 1-d tensor")
    if not flat.is_floating_point():
        raise ValueError(f"flat is of {flat.dtype}; gradients need a floating dtype")


def check_fit(tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int] | None) -> None:
    """Raise ValueError if places of tensors are outside ``flat`` or overlap, or if devices differ."""
    if offsets is None:
        offsets = packed_offsets(tensors)
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
    places = sorted((offset, i) for i, offset in enumerate(offsets) if tensors[i].numel())
    for (begin, i), (next_begin, j) in pairwise(places):
        if begin + tensors[i].numel() > next_begin:
            raise ValueError(
                f"the places of tensors {i} and {j} overlap: {tensors[i].numel()} elements at offset {begin} and"
                f" {tensors[j].numel()} at offset {next_begin}"
            )


def check_tensors(tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], flat: Tensor) -> None:
    """Raise ValueError unless there is one tensor for each shape, and `check_tensor` accepts it."""
    if len(tensors) != len(shapes):
        raise ValueError(f"{len(tensors)} tensors were given to a plan for {len(shapes)}")
    for i, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        check_tensor(i, tensor, shape, flat)


def check_tensor(index: int, tensor: Tensor, shape: Sequence[int], flat: Tensor) -> None:
    """Raise ValueError unless a tensor has this shape, the device of ``flat``, memory, and a floating dtype."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor {index} is of type {type(tensor).__name__}; pass torch tensors")
    if tensor.layout != torch.strided:
        raise ValueError(f"tensor {index} has layout {tensor.layout}, which has no memory to copy; pass its to_dense()")
    if tensor.device != flat.device:
        raise ValueError(f"tensor {index} is on {tensor.device} but flat is on {flat.device}; move one of them")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"tensor {index} has shape {tuple(tensor.shape)} but its place in flat was made for {tuple(shape)};"
            " make a plan for these tensors"
        )
    if not tensor.is_floating_point():
        raise ValueError(f"tensor {index} is of {tensor.dtype}; gradients need a floating dtype")


def check_memory(
    tensors: Sequence[Tensor],
    places: Sequence[Tensor],
    flat: Tensor,
    written: bool,
    indices: Iterable[int] | None = None,
) -> None:
    """Raise ValueError if a tensor shares memory with ``flat`` outside its place, or two written tensors share memory.

    ``places`` has the place of each in ``flat``. If ``indices`` are given, only those tensors are checked.
    """
    flat_begin, flat_end = _memory(flat)
    ranges = []
    for i in range(len(tensors)) if indices is None else indices:
        tensor, place = tensors[i], places[i]
        if not tensor.numel() or tensor.data_ptr() == 0:
            continue
        if written and _overlaps_itself(tensor):
            raise ValueError(
                f"tensor {i} with strides {tensor.stride()} has elements that share memory and cannot be written"
            )
        begin, end = _memory(tensor)
        in_place = begin == place.data_ptr() and tensor.dtype == place.dtype and same_layout(tensor, place)
        if begin < flat_end and end > flat_begin and not in_place:
            raise astray_error(i)
        ranges.append((begin, end, i))
    ranges.sort()
    for (_, end, i), (begin, _, j) in pairwise(ranges):
        if written and begin < end:
            raise ValueError(f"tensors {i} and {j} share memory; writing one would change the other")


def astray_error(index: int) -> ValueError:
    """The error for a tensor that shares memory with ``flat`` outside its place."""
    return ValueError(
        f"tensor {index} shares memory with flat but is not in its place there: writing one would change the other;"
        " clone it first"
    )


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have the same strides, except in dimensions of size 1."""
    return all(size == 1 or x == y for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True))


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may have the same address: some stride is smaller than the span of the smaller strides."""
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= span:
                return True
            span += (size - 1) * stride
    return False


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The first byte of the tensor's elements, and the byte after the last."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (span + 1) * tensor.element_size()
