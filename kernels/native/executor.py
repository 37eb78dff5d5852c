"""Flatten and unflatten on the CPU: the table of a bucket, the C++ loops, torch's number of threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_compile.kernels.native import library
from ddp_compile.kernels.native.library import DTYPE_CODES
from ddp_compile.kernels.native.tensor_table import NativeTensorTable


class NativeExecutor:
    """Moves the tensors of one bucket with the C++ library; see `FlattenExecutor`."""

    implementation = "native"

    def __init__(self, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int] | None) -> None:
        self._library = library.load()
        self._table = NativeTensorTable(self._library, tensors, flat, offsets)

    def read(self, tensors: Sequence[Tensor], flat: Tensor, written: bool) -> list[int]:
        return self._table.read(tensors, flat, written)

    def move(self, flat: Tensor, to_flat: bool, scale: float, stats: Tensor | None) -> None:
        self._library.copy(
            self._table.handle,
            flat.data_ptr(),
            DTYPE_CODES[flat.dtype],
            to_flat,
            scale,
            torch.get_num_threads(),
            None if stats is None else stats.data_ptr(),
        )

    def offset(self, index: int) -> int:
        return self._table.offset(index)
