"""Checks of the CUDA kernels on a device that runs them on the CPU, against the reference."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import kernel_values
import pytest
import torch
from kernel_values import FINITE, same_bits
from torch import Tensor

from ddp_compile.kernels.contract import layout, reference
from ddp_compile.kernels.cuda import elementwise
from ddp_compile.kernels.cuda.executor import CudaExecutor
from ddp_compile.kernels.cuda.module import KernelDevice

POISON = 77.0

values_of = functools.partial(kernel_values.values_of, special=FINITE, exponents=(-6, 4))


def stats_values(stats: Tensor) -> tuple[float, bool]:
    assert stats[8] in (0, 1) and not stats[9:].any()
    return stats[:8].view(torch.float64).item(), bool(stats[8])


def check_both_ways(
    device: KernelDevice,
    tensors: Sequence[Tensor],
    flat: Tensor,
    offsets: list[int] | None = None,
    scale: float = 1 / 3,
    with_stats: bool = True,
) -> None:
    """Move tensors that the kernels can move, and compare with the reference, also around the places."""
    executor = CudaExecutor(tensors, flat, offsets, device)
    pairs = list(zip(tensors, layout.packed_offsets(tensors) if offsets is None else offsets, strict=True))
    places = [layout.place_of(tensor, flat, offset) for tensor, offset in pairs]
    expected = flat.clone()
    expected_places = [layout.place_of(tensor, expected, offset) for tensor, offset in pairs]
    for to_flat in (True, False):
        sources, destinations = (tensors, expected_places) if to_flat else (places, [t.clone() for t in tensors])
        stats = torch.full((16,), 255, dtype=torch.uint8) if with_stats else None
        of_reference = reference.stats_of(sources, destinations, scale)
        reference.scale_into(sources, destinations, scale)
        assert list(executor.read(tensors, flat, written=not to_flat)) == []
        executor.move(flat, to_flat, scale, stats)
        if to_flat:
            assert same_bits(flat, expected)
        else:
            assert all(same_bits(t.reshape(-1), d.reshape(-1)) for t, d in zip(tensors, destinations, strict=True))
        if stats is not None:
            sum_of_squares, non_finite = stats_values(stats)
            assert sum_of_squares == pytest.approx(of_reference[0].item(), rel=1e-12)
            assert non_finite == of_reference[1].item()


def compressed(values: Tensor, num_chunks: int) -> Tensor:
    row_bytes = reference.row_bytes(-(-values.numel() // num_chunks))
    return torch.full((num_chunks, row_bytes), 255, dtype=torch.uint8)


def check_codec(device: KernelDevice, numel: int, dtype: torch.dtype, num_chunks: int) -> tuple[Tensor, Tensor]:
    """Compress, write and add, and compare with the reference; returns the values and their rows."""
    values = values_of(numel, dtype, misaligned_by=numel % 2)
    values *= torch.linspace(0.1, 1, numel)  # each slice has another minimum and maximum
    rows, expected_rows = compressed(values, num_chunks), compressed(values, num_chunks)
    reference.minmax_u8_compress(values, expected_rows)
    elementwise.minmax_u8_compress(values, rows, device=device)
    assert torch.equal(rows, expected_rows)
    out, expected = values_of(numel, dtype, seed=1, misaligned_by=numel % 3), torch.empty(numel, dtype=dtype)
    reference.minmax_u8_decompress(rows, expected)
    elementwise.minmax_u8_decompress(rows, out, device=device)
    assert same_bits(out, expected)
    reference.minmax_u8_decompress(rows, expected, accumulate=True)
    elementwise.minmax_u8_decompress(rows, out, accumulate=True, device=device)
    assert same_bits(out, expected)
    return values, rows


def check_average(device: KernelDevice, numel: int, dtype: torch.dtype, misaligned_by: tuple[int, int, int]) -> None:
    x, total, copy = (values_of(numel, dtype, seed, by) for seed, by in enumerate(misaligned_by))
    expected = x.clone()
    reference.average_into(expected, total, copy, 3)
    elementwise.average_into(x, total, copy, 3, device=device)
    assert same_bits(x, expected)
