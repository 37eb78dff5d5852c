"""Flatten and unflatten on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_compile.kernels.native import library
from ddp_compile.kernels.native.library import DTYPE_CODES
from ddp_compile.kernels.native.tensor_table import NativeTensorTable


class NativeExecutor(NativeTensorTable):
    """Moves the tensors of one bucket with the C++ library, with torch's number of threads; see `FlattenExecutor`."""

    implementation = "native"

    def __init__(self, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int] | None) -> None:
        super().__init__(library.load(), tensors, flat, offsets)

    def move(self, flat: Tensor, to_flat: bool, scale: float, stats: Tensor | None) -> None:
        self._library.copy(
            self.handle,
            flat.data_ptr(),
            DTYPE_CODES[flat.dtype],
            to_flat,
            scale,
            torch.get_num_threads(),
            None if stats is None else stats.data_ptr(),
        )
