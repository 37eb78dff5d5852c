"""Flatten and unflatten on a CUDA device."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from ddp_compile.kernels.cuda.arguments import BLOCKS_PER_MULTIPROCESSOR, packs_of
from ddp_compile.kernels.cuda.module import kernel_device
from ddp_compile.kernels.cuda.programs import FORMAT_OF, FORMATS, PACK_SIZES, move_kernel
from ddp_compile.kernels.native import library
from ddp_compile.kernels.native.executor import NativeTensorTable
from ddp_compile.kernels.native.library import OTHER_CODE


class CudaExecutor(NativeTensorTable):
    """Moves the tensors of one bucket with CUDA kernels; see `FlattenExecutor` and `NativeTensorTable`.

    Note [Everything is in the arguments]
    Sizes, places and addresses are passed by value with each launch: 24 bytes a tensor, at most 32 KiB a launch. A
    block finds its tensor by a binary search, which costs no more than reading a table in device memory. So nothing is
    uploaded, and nothing waits for an upload. A plan for one use costs no more than one that is kept. A captured CUDA
    graph owns everything that it needs, and replays the addresses that it was captured with.

    Raises a KernelUnavailableError if the kernels cannot be used on this device.
    """

    def __init__(self, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int] | None) -> None:
        self._device = kernel_device(flat.device)
        super().__init__(library.load(), tensors, flat, offsets)
        # Of the library's vectors, which never move: the tensors' addresses, and a number of ``DTYPE_CODES`` or
        # ``OTHER_CODE`` for each, as last read.
        self._addresses: int = self._library.table_addresses(self.handle) or 0
        self._dtypes = self._library.table_dtypes(self.handle)
        self._packs = packs_of(self.numels(), self.offsets())
        most_blocks = BLOCKS_PER_MULTIPROCESSOR * self._device.num_multiprocessors
        self._num_blocks = [min(pack.num_chunks, most_blocks) for pack in self._packs]
        self._codes = b""
        self._present: tuple[int, ...] = ()
        # Compiles all kernels of these programs now, not in the first step or the capture of a graph.
        here = FORMAT_OF[flat.dtype]
        for there in {tensor.dtype for tensor in tensors} & FORMAT_OF.keys():
            self._device.prepare(move_kernel(FORMAT_OF[there], here, PACK_SIZES[0]))
            self._device.prepare(move_kernel(here, FORMAT_OF[there], PACK_SIZES[0]))

    def read(self, tensors: Sequence[Tensor], flat: Tensor, written: bool) -> list[int]:
        others = super().read(tensors, flat, written)
        self._codes = ctypes.string_at(self._dtypes, len(tensors))
        is_uniform = self._codes.count(self._codes[:1]) == len(self._codes)
        found = self._codes[:1] if is_uniform else sorted(set(self._codes))
        self._present = tuple(code for code in found if code != OTHER_CODE)
        return others

    def move(self, flat: Tensor, to_flat: bool, scale: float | Tensor) -> None:
        # Kept alive by the caller until the kernels have been queued, and by the stream after that.
        scale_at = scale.data_ptr() if isinstance(scale, Tensor) else 0
        # Each launch reads one dtype. Most buckets have only one.
        codes = self._codes if len(self._present) != 1 or OTHER_CODE in self._codes else None
        for code in self._present:
            source, destination = FORMATS[code], FORMAT_OF[flat.dtype]
            if not to_flat:
                source, destination = destination, source
            for pack, num_blocks in zip(self._packs, self._num_blocks, strict=True):
                pack.point_at(self._addresses, codes, code)
                arguments = pack.structure
                arguments.flat = flat.data_ptr()
                arguments.scale = 1.0 if isinstance(scale, Tensor) else scale
                arguments.scale_at = scale_at
                arguments.to_flat = to_flat
                self._device.launch(move_kernel(source, destination, pack.size), num_blocks, pack)
