"""The addresses of a bucket's tensors, read by the C++ library if it was built, otherwise in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_compile.errors import KernelUnavailableError
from ddp_compile.kernels.contract import layout
from ddp_compile.kernels.native import library
from ddp_compile.kernels.native.library import DTYPE_CODES, NativeLibrary
from ddp_compile.kernels.native.tensor_table import NativeTensorTable

# kOther in native/csrc/formats.h, for tensors that are left to the reference.
OTHER_CODE = 255


def table_of(tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int] | None) -> LibraryTable | PythonTable:
    """The faster table that is available; raises the errors of `layout.check_fit`."""
    try:
        return LibraryTable(library.load(), tensors, flat, offsets)
    except KernelUnavailableError:
        return PythonTable(tensors, flat, offsets)


class LibraryTable(NativeTensorTable):
    """The library's table. Its vectors never move."""

    def __init__(
        self, library: NativeLibrary, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int] | None
    ) -> None:
        super().__init__(library, tensors, flat, offsets)
        self._num_tensors = len(tensors)
        #: Elements of each tensor, and of the flat buffer before its place; int64, on the CPU.
        self.numels = _copied(library.table_numels(self.handle), len(tensors))
        self.offsets = _copied(library.table_offsets(self.handle), len(tensors))
        #: Of an array of 64-bit integers, the tensors' addresses when last read.
        self.addresses: int = library.table_addresses(self.handle) or 0
        self._dtypes = library.table_dtypes(self.handle)

    def dtype_codes(self) -> bytes:
        """A number of ``DTYPE_CODES`` for each tensor that was read last, or ``OTHER_CODE``."""
        return ctypes.string_at(self._dtypes, self._num_tensors)


class PythonTable:
    """The same in Python, about fifty times slower to read."""

    def __init__(self, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int] | None) -> None:
        layout.check_fit(tensors, flat, offsets)
        placed = layout.packed_offsets(tensors) if offsets is None else list(offsets)
        # Users may have set another default device.
        self.numels = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.int64, device="cpu")
        self.offsets = torch.tensor(placed, dtype=torch.int64, device="cpu")
        self._places = [layout.place_of(tensor, flat, offset) for tensor, offset in zip(tensors, placed, strict=True)]
        self._addresses = (ctypes.c_uint64 * len(tensors))()
        self.addresses = ctypes.addressof(self._addresses)
        self._codes = bytes(len(tensors))

    def read(self, tensors: Sequence[Tensor], flat: Tensor, written: bool) -> list[int]:
        layout.check_tensors(tensors, [place.shape for place in self._places], flat)
        codes = [_code(tensor, place) for tensor, place in zip(tensors, self._places, strict=True)]
        layout.check_memory(tensors, self._places, flat, written)
        self._addresses[:] = [tensor.data_ptr() for tensor in tensors]
        self._codes = bytes(codes)
        return [i for i, code in enumerate(codes) if code == OTHER_CODE]

    def dtype_codes(self) -> bytes:
        return self._codes


def _code(tensor: Tensor, place: Tensor) -> int:
    if tensor.numel() == 0:
        return DTYPE_CODES.get(tensor.dtype, 0)
    if not layout.same_layout(tensor, place) or tensor.is_neg() or tensor.data_ptr() == 0:
        return OTHER_CODE
    return DTYPE_CODES.get(tensor.dtype, OTHER_CODE)


def _copied(integers: ctypes._Pointer[ctypes.c_int64], count: int) -> Tensor:
    result = torch.empty(count, dtype=torch.int64, device="cpu")
    if count:
        ctypes.memmove(result.data_ptr(), integers, 8 * count)
    return result
