"""The kernels on single tensors, on a CUDA device. Callers have checked dtypes, sizes and contiguity.

All of them run on torch's current stream of the tensors' device.
"""

import ctypes

import torch
from torch import Tensor

from ddp_compile.kernels.contract.reference import HEADER_BYTES, ROW_ALIGNMENT
from ddp_compile.kernels.cuda.arguments import (
    BLOCK_THREADS,
    BLOCKS_PER_MULTIPROCESSOR,
    NO_CHUNK,
    AddRowsArguments,
    Arguments,
    AverageArguments,
    CodecArguments,
)
from ddp_compile.kernels.cuda.module import KernelDevice, kernel_device
from ddp_compile.kernels.cuda.programs import FORMAT_OF

# kCodes in codec.cuh, and the smallest number of codes for a block.
_PACKET_CODES = 8
_MIN_SLICE_CODES = 2 * _PACKET_CODES * BLOCK_THREADS


def minmax_u8_compress(values: Tensor, rows: Tensor, skip_chunk: int | None = None) -> None:
    device = kernel_device(values.device)
    arguments, num_blocks = _codec_arguments(values, rows, device)
    # Two floats for each block. The memory may be reused when this returns, but only on the same stream.
    partials = torch.empty(2 * num_blocks, dtype=torch.float32, device=values.device)
    arguments.structure.partials = partials.data_ptr()
    if skip_chunk is not None:
        arguments.structure.skipped = skip_chunk
    for kernel in ("find_minmax", "write_codes"):
        device.launch(f"{kernel}_{FORMAT_OF[values.dtype]}", num_blocks, arguments)


def minmax_u8_decompress(rows: Tensor, values: Tensor, accumulate: bool = False) -> None:
    device = kernel_device(values.device)
    arguments, num_blocks = _codec_arguments(values, rows, device)
    kernel = "add_codes" if accumulate else "read_codes"
    device.launch(f"{kernel}_{FORMAT_OF[values.dtype]}", num_blocks, arguments)


def average_into(x: Tensor, total: Tensor, copy: Tensor, count: float) -> None:
    arguments = AverageArguments(x.data_ptr(), total.data_ptr(), copy.data_ptr(), x.numel(), count)
    _launch_over(x, f"average_{FORMAT_OF[x.dtype]}", arguments)


def add_rows(rows: Tensor, out: Tensor, scale: float) -> None:
    arguments = AddRowsArguments(rows.data_ptr(), out.data_ptr(), out.numel(), len(rows), scale)
    _launch_over(out, f"add_rows_{FORMAT_OF[out.dtype]}", arguments)


def _launch_over(written: Tensor, kernel: str, arguments: ctypes.Structure) -> None:
    """Launch as many blocks as there is work for, in packets of 16 bytes that are written."""
    device = kernel_device(written.device)
    num_packets = -(-written.numel() * written.element_size() // 16)
    num_blocks = min(-(-num_packets // BLOCK_THREADS), BLOCKS_PER_MULTIPROCESSOR * device.num_multiprocessors)
    if num_blocks:
        device.launch(kernel, num_blocks, Arguments(arguments))


def _codec_arguments(values: Tensor, rows: Tensor, device: KernelDevice) -> tuple[Arguments, int]:
    """The arguments without partials, and the number of blocks: one for each slice of each chunk."""
    if rows.data_ptr() % ROW_ALIGNMENT:
        raise ValueError(
            f"rows begin at address {rows.data_ptr():#x}, which is not a multiple of {ROW_ALIGNMENT}; pass a tensor"
            " that owns its memory, or a view at such a multiple"
        )
    num_chunks, row_bytes = rows.shape
    num_codes = row_bytes - HEADER_BYTES
    wanted = -(-BLOCKS_PER_MULTIPROCESSOR * device.num_multiprocessors // num_chunks)
    slice_numel = max(-(-num_codes // wanted), _MIN_SLICE_CODES)
    slice_numel = -(-slice_numel // _PACKET_CODES) * _PACKET_CODES
    num_slices = -(-num_codes // slice_numel)
    chunk_numel = -(-values.numel() // num_chunks)
    arguments = CodecArguments(
        values.data_ptr(), rows.data_ptr(), 0, values.numel(), chunk_numel, row_bytes, slice_numel, num_slices, NO_CHUNK
    )
    return Arguments(arguments), num_chunks * num_slices
