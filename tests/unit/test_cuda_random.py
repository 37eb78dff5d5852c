"""Whole plans with the CUDA kernels, emulated, against plans of the reference: random shapes, layouts, dtypes, gaps."""

from __future__ import annotations

import pytest
import torch
from cuda_emulation import EmulatedDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_compile.kernels import FlattenPlan
from ddp_compile.kernels.cuda.executor import CudaExecutor

# float64, transposed and strided tensors are left to torch, in one plan with the others.
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LAYOUTS = ["contiguous", "transposed", "strided", "unaligned"]

shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3) | st.tuples(st.sampled_from([63, 700, 8192, 8193]))
described = st.tuples(shapes, st.sampled_from(LAYOUTS), st.sampled_from(DTYPES), st.integers(0, 99))


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    return EmulatedDevice(tmp_path_factory.mktemp("programs"))


def tensor_of(shape: list[int], layout: str, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-9, 9, (numel,), generator=generator)
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 65520.0, 1e-45, 3.39e38])
    chosen = special[torch.randint(len(special), (numel,), generator=generator)]
    values = torch.where(torch.rand(numel, generator=generator) < 0.05, chosen, values).to(dtype)
    if layout == "transposed":
        return values.reshape(shape[::-1]).permute(list(range(len(shape)))[::-1])
    if layout == "strided":
        return torch.stack([values.reshape(shape)] * 2, dim=-1)[..., 1]
    if layout == "unaligned":
        return torch.cat([torch.zeros(1, dtype=dtype), values])[1:].view(shape)
    return values.reshape(shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, signs of zeros included; any NaN equals any other."""
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    return bool(((a.contiguous().view(bits) == b.contiguous().view(bits)) | (a.isnan() & b.isnan())).all())


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    described=st.lists(described, max_size=6),
    flat_dtype=st.sampled_from(DTYPES[:3]),
    gap=st.integers(0, 33),
    scale=st.sampled_from([1.0, 0.5, 1 / 3, 0.0, -2.5, 1e30]),
    with_stats=st.booleans(),
)
def test_every_bit_is_the_references(
    device: EmulatedDevice,
    described: list[tuple[list[int], str, torch.dtype, int]],
    flat_dtype: torch.dtype,
    gap: int,
    scale: float,
    with_stats: bool,
) -> None:
    tensors = [tensor_of(list(shape), layout, dtype, seed) for shape, layout, dtype, seed in described]
    offsets, end = [], gap % 5
    for tensor in tensors:
        offsets.append(end)
        end += tensor.numel() + gap
    flats = [torch.full((end,), 7.0, dtype=flat_dtype) for _ in range(2)]
    plans = [FlattenPlan.for_bucket(tensors, flat, offsets, implementation="reference") for flat in flats]
    plans[1]._executor = CudaExecutor(tensors, flats[1], offsets, device)
    # Gradients may come with other strides than the plan was made for.
    given_tensors = [tensor.contiguous() if i % 3 == 2 else tensor for i, tensor in enumerate(tensors)]
    stats = [plan.flatten(given_tensors, scale, with_stats=with_stats) for plan in plans]
    assert same_bits(*flats)
    backs = [[torch.full_like(tensor, 7.0) for tensor in given_tensors] for _ in plans]
    for plan, back in zip(plans, backs, strict=True):
        plan.unflatten(back, scale)
    assert all(same_bits(a, b) for a, b in zip(*backs, strict=True))
    if stats[0] is not None and stats[1] is not None:
        assert stats[0].non_finite == stats[1].non_finite
        torch.testing.assert_close(stats[1].sum_of_squares, stats[0].sum_of_squares, rtol=1e-9, atol=0, equal_nan=True)
