"""The arguments of the kernels, in the layout of source/*.cuh."""

import ctypes
import functools

import torch
from torch import Tensor

from ddp_compile.kernels.cuda.programs import PACK_SIZES

# kThreads in device.cuh, kChunk in move.cuh.
BLOCK_THREADS = 256
CHUNK_NUMEL = 8192

# The 2048 threads that a multiprocessor holds at most. Of kernels with more than 32 registers a thread, four or five
# blocks run at a time, and the others start as those end, which evens out unequal work.
BLOCKS_PER_MULTIPROCESSOR = 8

# kNone in codec.cuh.
NO_CHUNK = 2**32 - 1

_ADDRESS = ctypes.c_uint64
_SIZE = ctypes.c_uint64


class Arguments:
    """A structure, kept alive, and the array of addresses that a launch takes."""

    def __init__(self, structure: ctypes.Structure) -> None:
        self.structure = structure
        self._addresses = (ctypes.c_void_p * 1)(ctypes.addressof(structure))
        self.parameters = ctypes.addressof(self._addresses)


class AverageArguments(ctypes.Structure):
    """Of average.cuh."""

    _fields_ = (("x", _ADDRESS), ("total", _ADDRESS), ("copy", _ADDRESS), ("numel", _SIZE), ("count", ctypes.c_float))


class AddRowsArguments(ctypes.Structure):
    """Of sum.cuh."""

    _fields_ = (
        ("rows", _ADDRESS),
        ("out", _ADDRESS),
        ("numel", _SIZE),
        ("num_rows", ctypes.c_uint32),
        ("scale", ctypes.c_float),
    )


class CodecArguments(ctypes.Structure):
    """Of codec.cuh."""

    _fields_ = (
        ("values", _ADDRESS),
        ("rows", _ADDRESS),
        ("partials", _ADDRESS),
        ("numel", _SIZE),
        ("chunk_numel", _SIZE),
        ("row_bytes", _SIZE),
        ("slice_numel", _SIZE),
        ("num_slices", ctypes.c_uint32),
        ("skipped", ctypes.c_uint32),
    )


@functools.cache
def _move_arguments(size: int) -> type[ctypes.Structure]:
    class MoveArguments(ctypes.Structure):
        """Of move.cuh, for up to ``size`` tensors."""

        _fields_ = (
            ("flat", _ADDRESS),
            ("scale_at", _ADDRESS),
            ("num_chunks", ctypes.c_uint32),
            ("num_tensors", ctypes.c_uint32),
            ("scale", ctypes.c_float),
            ("to_flat", ctypes.c_uint32),
            ("addresses", _ADDRESS * size),
            ("offsets", _SIZE * size),
            ("end_chunks", ctypes.c_uint32 * size),
            ("last_counts", ctypes.c_uint32 * size),
        )

    return MoveArguments


class Pack(Arguments):
    """Consecutive tensors of a bucket that one launch moves. Only their addresses change between steps.

    ``numels`` and ``offsets``, which are in elements of the flat buffer, are int64 of shape (number of tensors).
    """

    def __init__(self, first: int, numels: Tensor, offsets: Tensor) -> None:
        self.first = first
        self.num_tensors = len(numels)
        self.size = next(size for size in PACK_SIZES if size >= len(numels))
        super().__init__(_move_arguments(self.size)())
        end_chunks = ((numels + (CHUNK_NUMEL - 1)) // CHUNK_NUMEL).cumsum(0, dtype=torch.int32)
        self._set("offsets", offsets)
        self._set("end_chunks", end_chunks)
        self._set("last_counts", ((numels - 1) % CHUNK_NUMEL + 1).to(torch.int32))  # meaningless for empty tensors
        self.num_chunks = self.structure.end_chunks[self.num_tensors - 1]
        self.structure.num_chunks = self.num_chunks
        self.structure.num_tensors = self.num_tensors

    def point_at(self, addresses: int, codes: bytes | None, code: int) -> None:
        """Copy this pack's addresses from those of all tensors of the bucket, 64-bit integers at ``addresses``.

        ``codes``, if given, are the dtype codes of all tensors. Only those with ``code`` will be moved.
        """
        mine = self.structure.addresses
        ctypes.memmove(mine, addresses + 8 * self.first, 8 * self.num_tensors)
        if codes is not None:
            for i, found in enumerate(codes[self.first : self.first + self.num_tensors]):
                if found != code:
                    mine[i] = 0

    def _set(self, field: str, values: Tensor) -> None:
        ctypes.memmove(getattr(self.structure, field), values.data_ptr(), values.element_size() * len(values))


def packs_of(numels: Tensor, offsets: Tensor) -> list[Pack]:
    """The launches that move tensors of these sizes; none if all tensors are empty."""
    step = PACK_SIZES[-1]
    starts = range(0, len(numels), step)
    packs = [Pack(start, numels[start : start + step], offsets[start : start + step]) for start in starts]
    return [pack for pack in packs if pack.num_chunks]
