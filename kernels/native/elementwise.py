"""The kernels on single tensors, on the CPU. Callers have checked dtypes, sizes and contiguity."""

import torch
from torch import Tensor

from ddp_compile.kernels.native import library
from ddp_compile.kernels.native.library import DTYPE_CODES


def minmax_u8_compress(values: Tensor, rows: Tensor, skip_chunk: int | None = None) -> None:
    chunk_numel = -(-values.numel() // len(rows))
    library.load().minmax_u8_compress(
        DTYPE_CODES[values.dtype],
        values.data_ptr(),
        values.numel(),
        len(rows),
        chunk_numel,
        rows.shape[1],
        -1 if skip_chunk is None else skip_chunk,
        rows.data_ptr(),
        torch.get_num_threads(),
    )


def minmax_u8_decompress(rows: Tensor, values: Tensor, accumulate: bool = False) -> None:
    library.load().minmax_u8_decompress(
        DTYPE_CODES[values.dtype],
        rows.data_ptr(),
        values.numel(),
        len(rows),
        -(-values.numel() // len(rows)),
        rows.shape[1],
        accumulate,
        values.data_ptr(),
        torch.get_num_threads(),
    )


def average_into(x: Tensor, total: Tensor, copy: Tensor, count: float) -> None:
    library.load().average(
        DTYPE_CODES[x.dtype], x.data_ptr(), total.data_ptr(), copy.data_ptr(), x.numel(), count, torch.get_num_threads()
    )


def add_rows(rows: Tensor, out: Tensor, scale: float) -> None:
    library.load().add_rows(
        DTYPE_CODES[out.dtype], rows.data_ptr(), len(rows), out.numel(), scale, out.data_ptr(), torch.get_num_threads()
    )
