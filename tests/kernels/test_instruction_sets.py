"""The C++ loops of every instruction set that this processor has, and those of other builds, against torch's."""

import math

import pytest
import torch
from in_ci import only
from kernel_checks import check_add_rows, check_average, check_codec, check_moves
from kernel_values import DTYPES, same_bits, values_of
from torch import Tensor

from ddp_compile import kernels
from ddp_compile.kernels import FlattenPlan

# Around the widths of all registers, around the four vectors of one turn.
SIZES = [0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 200, 9001]


def check_both_ways(tensors: list[Tensor], flat_dtype: torch.dtype, scale: float) -> None:
    flat = torch.full((sum(tensor.numel() for tensor in tensors) + 1,), 7.0, dtype=flat_dtype)
    check_moves(tensors, flat, None, scale)


@pytest.mark.parametrize("flat_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_sizes(loops: str, dtype: torch.dtype, flat_dtype: torch.dtype) -> None:
    tensors = [values_of(numel, dtype, seed) for seed, numel in enumerate(SIZES)]
    check_both_ways(tensors, flat_dtype, 1 / 3)
    ordinary = [torch.randn(numel).to(dtype) for numel in SIZES]
    check_both_ways(ordinary, flat_dtype, 1.0)
    unaligned = [torch.randn(numel + 1).to(dtype)[1:] for numel in SIZES]
    check_both_ways(unaligned, flat_dtype, -2.5)


@pytest.mark.parametrize("flat_dtype", DTYPES)
def test_large_buckets(loops: str, flat_dtype: torch.dtype) -> None:
    numel = (8 << 20) // flat_dtype.itemsize
    tensors = [torch.randn(3), torch.randn(numel // 2 + 5), torch.randn(numel // 2)]
    check_both_ways(tensors, flat_dtype, 1 / 3)


def test_every_half_precision_value(loops: str) -> None:
    """All 65536 bit patterns as sources; as destinations, all neighbors' midpoints and the values beside those."""
    for dtype in (torch.bfloat16, torch.float16):
        patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
        widened = torch.empty(65536)
        FlattenPlan([patterns], widened).flatten([patterns], 1.0)
        assert same_bits(widened, patterns.float())
        finite = patterns[patterns.isfinite() & (patterns >= 0)].double().sort().values
        midpoints = ((finite[1:] + finite[:-1]) / 2).float()
        around = torch.cat([midpoints, *(torch.nextafter(midpoints, torch.tensor(to)) for to in (0.0, math.inf))])
        around = torch.cat([around, -around])
        narrowed = torch.empty(len(around), dtype=dtype)
        FlattenPlan([around], narrowed).flatten([around], 1.0)
        assert same_bits(narrowed, around.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nan_bits(loops: str, dtype: torch.dtype) -> None:
    """No bit may depend on where a thread's part begins."""
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    for nan in nans:
        flat = torch.empty(67, dtype=dtype)
        kernels.flatten_scale([nan.repeat(67)], flat, 1.0)
        assert len(flat.view(torch.int16).unique()) == 1 and flat.isnan().all()


@pytest.mark.parametrize("dtype", only([torch.bfloat16], DTYPES))
def test_codec_and_averaging(loops: str, dtype: torch.dtype) -> None:
    """bfloat16 values often lie halfway between two codes, so that one rounding too many shows."""
    for seed, numel in enumerate([*SIZES, 70_001]):
        generator = torch.Generator().manual_seed(numel)
        values = torch.randn(numel, generator=generator).to(dtype)
        check_average([values, values * 3, values * 0.3])
        check_add_rows(torch.stack([values, values * 3, values * 0.3]))
        exponent, out_dtype = (0, -44, 20, 38)[seed % 4], DTYPES[seed % 3]
        for num_chunks in (1, 3, 9):
            check_codec(values, num_chunks, dtype)
            check_codec((torch.randn(numel, generator=generator) * 10.0**exponent).to(dtype), num_chunks, out_dtype)
        if numel > 2:
            values[numel // 2] = math.nan
            check_codec(values, 2, dtype)
