"""Flatten and unflatten on the CPU. The library reads the addresses of a bucket's tensors in one call."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_compile.kernels.contract import layout
from ddp_compile.kernels.native import library
from ddp_compile.kernels.native.library import DTYPE_CODES, FITS, MISMATCH, OUT_OF_MEMORY, NativeLibrary


class NativeTensorTable:
    """Shapes, strides and places of tensors, and their addresses when last read; see csrc/tensor_table.h.

    The tensors are not kept. ``offsets`` are their places in ``flat``, in elements; packed when None. Raises a
    ValueError if they do not fit into ``flat``.
    """

    def __init__(
        self, library: NativeLibrary, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int] | None
    ) -> None:
        self._library = library
        fit = ctypes.c_int64()
        try:
            self.handle = library.table_new(library.exchange_api, tuple(tensors), ctypes.byref(fit))
        except RuntimeError:  # torch's, for a tensor without an address, for example on the meta device
            layout.check_fit(tensors, flat, offsets)
            raise
        if fit.value == OUT_OF_MEMORY:
            raise MemoryError(f"no memory for a plan of {len(tensors)} tensors")
        wrong_number = offsets is not None and len(offsets) != len(tensors)
        if offsets and (wrong_number or min(offsets) < 0 or max(offsets) > flat.numel()):
            layout.check_fit(tensors, flat, offsets)  # ctypes would truncate large integers
        placed = None if offsets is None else (ctypes.c_int64 * len(offsets))(*offsets)
        wrong_device = len(tensors) > 0 and tensors[0].device != flat.device
        if (
            fit.value != FITS
            or wrong_number
            or wrong_device
            or library.table_place_at(self.handle, placed, flat.numel()) >= 0
        ):
            # The check in Python raises the error.
            layout.check_fit(tensors, flat, offsets)
            raise AssertionError("the library refused tensors that fit")

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self._library.table_free(handle)

    def read(self, tensors: Sequence[Tensor], flat: Tensor, written: bool) -> list[int]:
        """See `FlattenExecutor.read`; ``flat`` is of a dtype in ``DTYPE_CODES``."""
        library = self._library
        if len(tensors) != library.table_size(self.handle):
            raise ValueError(f"{len(tensors)} tensors were given to a plan for {library.table_size(self.handle)}")
        try:
            fit = library.table_read(self.handle, library.exchange_api, tuple(tensors))
        except RuntimeError:
            for i, tensor in enumerate(tensors):
                layout.check_tensor(i, tensor, self.shape(i), flat)
            raise
        if fit == OUT_OF_MEMORY:
            raise MemoryError(f"no memory to read {len(tensors)} tensors")
        others = library.table_others(self.handle)[: library.table_num_others(self.handle)]
        if fit == MISMATCH:
            layout.check_tensor(others[-1], tensors[others[-1]], self.shape(others[-1]), flat)
            raise AssertionError("the library refused a tensor that fits")
        astray = library.table_first_astray(self.handle, flat.data_ptr(), DTYPE_CODES[flat.dtype], flat.numel())
        if astray >= 0:
            raise layout.astray_error(astray)
        if written and library.table_any_overlap(self.handle):
            offsets = library.table_offsets(self.handle)
            places = [layout.place_of(tensor, flat, offsets[i]) for i, tensor in enumerate(tensors)]
            layout.check_memory(tensors, places, flat, written=True)
            raise AssertionError("the library reported an overlap that does not exist")
        return list(others)

    def numels(self) -> Tensor:
        """Elements of each tensor; int64, on the CPU."""
        return self._copied(self._library.table_numels(self.handle))

    def offsets(self) -> Tensor:
        """Where each tensor's place begins, in elements of the flat buffer; int64, on the CPU."""
        return self._copied(self._library.table_offsets(self.handle))

    def _copied(self, integers: "ctypes._Pointer[ctypes.c_int64]") -> Tensor:
        count = self._library.table_size(self.handle)
        # Users may have set another default device.
        result = torch.empty(count, dtype=torch.int64, device="cpu")
        ctypes.memmove(result.data_ptr(), integers, 8 * count)
        return result

    def shape(self, index: int) -> list[int]:
        num_dims = ctypes.c_int64()
        sizes = self._library.table_sizes(self.handle, index, ctypes.byref(num_dims))
        return list(sizes[: num_dims.value])


class NativeExecutor(NativeTensorTable):
    """Moves the tensors of one bucket with the C++ library, with torch's number of threads; see `FlattenExecutor`."""

    def __init__(self, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int] | None) -> None:
        super().__init__(library.load(), tensors, flat, offsets)

    def move(self, flat: Tensor, to_flat: bool, scale: float | Tensor) -> None:
        self._library.copy(
            self.handle, flat.data_ptr(), DTYPE_CODES[flat.dtype], to_flat, float(scale), torch.get_num_threads()
        )
