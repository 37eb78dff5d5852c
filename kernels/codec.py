"""The kernels on single tensors, with their checks: the min-max codec with eight bits a value, averaging, and sums."""

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ddp_compile.kernels.contract import reference
from ddp_compile.kernels.executors import KERNEL_DTYPES, choose
from ddp_compile.kernels.native import elementwise as native


def compressed_like(values: Tensor, num_chunks: int, skip_chunk: int | None) -> Tensor:
    """Memory for the compressed form of ``values``; raises ValueError for numbers of chunks that do not exist."""
    if num_chunks < 1:
        raise ValueError(f"num_chunks={num_chunks} must be at least 1")
    if skip_chunk is not None and not 0 <= skip_chunk < num_chunks:
        raise ValueError(f"skip_chunk={skip_chunk} must be one of the num_chunks={num_chunks} chunks, counted from 0")
    chunk_numel = -(-values.numel() // num_chunks)
    shape = (num_chunks, reference.row_bytes(chunk_numel))
    return torch.empty(shape, dtype=torch.uint8, device=values.device)


def compress(values: Tensor, num_chunks: int, skip_chunk: int | None) -> Tensor:
    _check_values("values", values)
    _check_memory(values=values)
    rows = compressed_like(values, num_chunks, skip_chunk)
    _module_for(values).minmax_u8_compress(values, rows, skip_chunk)
    return rows


def check_rows(rows: Tensor, values: Tensor) -> None:
    """Raise ValueError unless ``rows`` has the size of the compressed form of ``values``."""
    _check_values("out", values)
    if rows.dim() != 2 or not rows.is_contiguous() or rows.dtype != torch.uint8 or not len(rows):
        raise ValueError(
            f"compressed is of {rows.dtype}, shape {tuple(rows.shape)}, strides {rows.stride()}; pass what"
            " minmax_u8_compress returned"
        )
    if rows.device != values.device:
        raise ValueError(f"compressed is on {rows.device} but out is on {values.device}; move one of them")
    expected = reference.row_bytes(-(-values.numel() // len(rows)))
    if rows.shape[1] != expected:
        raise ValueError(
            f"compressed has {len(rows)} rows of {rows.shape[1]} bytes, but out with {values.numel()} elements needs"
            f" rows of {expected} bytes"
        )


def decompress(rows: Tensor, values: Tensor, accumulate: bool) -> None:
    check_rows(rows, values)
    _check_memory(compressed=rows, out=values)
    _refuse_overlap("out", values, compressed=rows)
    _module_for(values).minmax_u8_decompress(rows, values, accumulate)
    increment_version([values])


def check_average(x: Tensor, total: Tensor, copy: Tensor, count: float) -> None:
    """Raise ValueError unless the tensors agree and the count is positive."""
    named = {"x": x, "total": total, "copy": copy}
    for name, tensor in named.items():
        _check_values(name, tensor)
        if tensor.numel() != x.numel() or tensor.dtype != x.dtype or tensor.device != x.device:
            raise ValueError(
                f"{name} has {tensor.numel()} elements of {tensor.dtype} on {tensor.device}, but x has {x.numel()} of"
                f" {x.dtype} on {x.device}; the three must agree"
            )
    if not count > 0:
        raise ValueError(f"count={count} must be positive: it is the number of ranks that total is the sum of")


def average_into(x: Tensor, total: Tensor, copy: Tensor, count: float) -> None:
    check_average(x, total, copy, count)
    _check_memory(x=x, total=total, copy=copy)
    _refuse_overlap("x", x, total=total, copy=copy)
    _module_for(x).average_into(x, total, copy, count)
    increment_version([x])


def check_rows_to_add(rows: Tensor, out: Tensor) -> None:
    """Raise ValueError unless each row has the size, dtype and device of ``out``."""
    if rows.dim() != 2 or not rows.is_contiguous() or not len(rows) or rows.shape[1:] != out.shape:
        raise ValueError(
            f"rows have shape {tuple(rows.shape)}, strides {rows.stride()}; for out of shape {tuple(out.shape)} pass a"
            " contiguous tensor of shape (rows, elements) with at least one row"
        )
    if not out.is_contiguous() or not out.is_floating_point() or rows.dtype != out.dtype or rows.device != out.device:
        raise ValueError(
            f"rows are of {rows.dtype} on {rows.device}, out is of {out.dtype} on {out.device}, strides {out.stride()};"
            " both must be of one floating dtype, on one device and contiguous"
        )


def add_rows(rows: Tensor, out: Tensor, scale: float) -> None:
    check_rows_to_add(rows, out)
    _check_memory(rows=rows, out=out)
    _refuse_overlap("out", out, rows=rows)
    _module_for(out).add_rows(rows, out, scale)
    increment_version([out])


def _check_values(name: str, values: Tensor) -> None:
    if values.dim() != 1 or not values.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, strides {values.stride()}; pass a contiguous 1-d tensor"
        )
    if values.dtype not in KERNEL_DTYPES:
        raise ValueError(f"{name} is of {values.dtype}; float32, bfloat16 and float16 are supported")


def _check_memory(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.data_ptr():
            raise ValueError(f"{name} with {tensor.numel()} elements has no memory: its storage has been freed")


def _module_for(values: Tensor) -> ModuleType:
    implementation = choose(values.device, values.dtype)
    if implementation == "cuda":
        from ddp_compile.kernels.cuda import elementwise as cuda  # loaded only if there is a GPU

        return cuda
    return native if implementation == "native" else reference


def _refuse_overlap(written_name: str, written: Tensor, **read: Tensor) -> None:
    begin, end = written.data_ptr(), written.data_ptr() + written.nbytes
    for name, tensor in read.items():
        if tensor.data_ptr() < end and begin < tensor.data_ptr() + tensor.nbytes:
            raise ValueError(f"{written_name}, which is written, shares memory with {name}; pass other memory")
