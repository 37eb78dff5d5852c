"""The kernels as functions that torch.compile can trace: operators of the namespace ``ddp_compile``.

They are registered with ``torch.library.Library``, since a call through ``torch.library.custom_op`` costs five times as
much. The operators have no gradients, and have one implementation for all devices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_compile.kernels import codec
from ddp_compile.kernels.contract import layout
from ddp_compile.kernels.flatten_plan import FlattenPlan

_LIBRARY = torch.library.Library("ddp_compile", "DEF")


def flatten_scale(
    tensors: Sequence[Tensor], flat: Tensor, scale: float, *, offsets: Sequence[int] | None = None
) -> None:
    """Write ``tensors * scale`` to ``flat``, cast to its dtype.

    Products are computed in float32 (float64 if a tensor is) and rounded once, to nearest even. If some order of a
    tensor's dimensions is contiguous, the tensor is written in memory order, otherwise in index order.

    Args:
        tensors: Tensors of any shape and floating dtype on the device of ``flat``.
        flat: One-dimensional contiguous buffer of a floating dtype. Gaps between the tensors are not written.
        scale: Factor for every element.
        offsets: Where each tensor starts, in elements of ``flat``; packed without gaps when None.

    Raises:
        ValueError: Shapes, devices, dtypes or offsets do not fit, or memory is shared. Then ``flat`` is unchanged.
    """
    torch.ops.ddp_compile.flatten_scale(tensors, flat, scale, offsets)


def unflatten(
    flat: Tensor, tensors: Sequence[Tensor], scale: float = 1.0, *, offsets: Sequence[int] | None = None
) -> None:
    """Write ``flat * scale`` back to the tensors, cast to their dtypes; the inverse of `flatten_scale`.

    Arguments and errors are those of `flatten_scale`; the tensors must not share memory with each other.
    """
    torch.ops.ddp_compile.unflatten(flat, tensors, scale, offsets)


def minmax_u8_compress(values: Tensor, num_chunks: int = 1, *, skip_chunk: int | None = None) -> Tensor:
    """Compress values to eight bits each, relative to the smallest and largest value of their chunk.

    The values are cut into ``num_chunks`` chunks of equal length; the last ones may be shorter or empty. With step =
    (max - min) / 255, computed in double, a code is round((value - min) / step), ties to even, within 0..255.

    Args:
        values: Contiguous tensor of shape (n,), of float32, bfloat16 or float16.
        num_chunks: Number of chunks, each with its own minimum and maximum; one for each rank in an all-to-all.
        skip_chunk: Index of a chunk to leave out, such as a rank's own in an all-to-all. Its row is not written.

    Returns:
        uint8 tensor of shape (num_chunks, row_bytes): minimum and maximum as float32, a code for each value, zeros up
        to a multiple of 16 bytes. A chunk with a NaN or an infinity has NaN for both, and decompresses to NaN.

    Raises:
        ValueError: Another shape or dtype, ``num_chunks`` < 1, or chunk ``skip_chunk`` does not exist.

    Source: MinMaxUInt8 of Bagua (Gan et al. 2021, arXiv 2107.01499), without its epsilon and with codes clamped at
    both ends, so that the error is half a step at any scale.
    """
    result: Tensor = torch.ops.ddp_compile.minmax_u8_compress(values, num_chunks, skip_chunk)
    return result


def minmax_u8_decompress(compressed: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """Write min + code * (max - min) / 255 for each compressed value to ``out``. Equal bytes give equal values.

    Args:
        compressed: The result of `minmax_u8_compress`, or rows of it from several ranks.
        out: Contiguous tensor of shape (n,), of float32, bfloat16 or float16, with as many chunks as there are rows.
        accumulate: Add the values to those of ``out``, in float32, rounded once.

    Raises:
        ValueError: Another shape, dtype or device, or rows of another length than ``out`` needs.
    """
    torch.ops.ddp_compile.minmax_u8_decompress(compressed, out, accumulate)


def average_into(x: Tensor, total: Tensor, copy: Tensor, count: float) -> None:
    """``x += total / count - copy``, in float32, rounded once: the update of asynchronous model averaging.

    Args:
        x: Contiguous tensor of shape (n,), of float32, bfloat16 or float16.
        total: Sum of the ranks' copies, of the same shape, dtype and device.
        copy: This rank's contribution to it, of the same shape, dtype and device.
        count: Number of ranks.

    Raises:
        ValueError: Shapes, dtypes or devices differ, ``total`` or ``copy`` overlaps ``x``, or ``count`` <= 0.
    """
    torch.ops.ddp_compile.average_into(x, total, copy, count)


def add_rows(rows: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """``out = (rows[0] + rows[1] + ...) * scale``, in this order, in float32 (float64 for float64), rounded once.

    Args:
        rows: Contiguous tensor of shape (rows, n), of any floating dtype: one row from each rank.
        out: Contiguous tensor of shape (n,), of the same dtype and device, in other memory.
        scale: Factor for every sum.

    Raises:
        ValueError: Shapes, dtypes or devices differ, there is no row, or ``out`` overlaps ``rows``.
    """
    torch.ops.ddp_compile.add_rows(rows, out, scale)


def _fake_move(tensors: Sequence[Tensor], flat: Tensor) -> None:
    # If one tensor is on the meta device, real tensors also get here.
    layout.check_flat(flat)
    for i, tensor in enumerate(tensors):
        layout.check_tensor(i, tensor, tensor.shape, flat)


_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # schema: function and fake
    "flatten_scale(Tensor[] tensors, Tensor(a!) flat, float scale, SymInt[]? offsets) -> ()": (
        lambda tensors, flat, scale, offsets: FlattenPlan(tensors, flat, offsets).flatten(tensors, scale),
        lambda tensors, flat, *_: _fake_move(tensors, flat),
    ),
    "unflatten(Tensor flat, Tensor(a!)[] tensors, float scale, SymInt[]? offsets) -> ()": (
        lambda flat, tensors, scale, offsets: FlattenPlan(tensors, flat, offsets).unflatten(tensors, scale),
        lambda flat, tensors, *_: _fake_move(tensors, flat),
    ),
    "minmax_u8_compress(Tensor values, int num_chunks, int? skip_chunk) -> Tensor": (
        codec.compress,
        codec.compressed_like,
    ),
    "minmax_u8_decompress(Tensor compressed, Tensor(a!) out, bool accumulate) -> ()": (
        codec.decompress,
        lambda compressed, out, _: codec.check_rows(compressed, out),
    ),
    "average_into(Tensor(a!) x, Tensor total, Tensor copy, float count) -> ()": (
        codec.average_into,
        codec.check_average,
    ),
    "add_rows(Tensor rows, Tensor(a!) out, float scale) -> ()": (
        codec.add_rows,
        lambda rows, out, _: codec.check_rows_to_add(rows, out),
    ),
}
for _schema, (_function, _fake) in _OPERATORS.items():
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ddp_compile::{_name}", _fake, lib=_LIBRARY)
