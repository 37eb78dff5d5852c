"""Whole plans, bit for bit those of torch's operations, over random shapes, layouts, offsets and dtypes."""

from __future__ import annotations

import pytest
import torch
from cuda_emulation import EmulatedDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_values import DTYPES, LAYOUTS, same_bits, tensor_of, using

from ddp_compile.kernels import FlattenPlan
from ddp_compile.kernels.cuda.executor import CudaExecutor

SHAPES = st.lists(st.integers(0, 7), max_size=3) | st.tuples(st.integers(0, 700) | st.sampled_from([8192, 8193]))
# The kernels leave float64, transposed and strided tensors to torch, in one plan with the others.
TENSORS = st.tuples(SHAPES, st.sampled_from(LAYOUTS), st.sampled_from([*DTYPES, torch.float64]), st.integers(0, 99))
CASES = given(
    described=st.lists(TENSORS, max_size=6),
    flat_dtype=st.sampled_from(DTYPES),
    gap=st.integers(0, 33),
    scale=st.sampled_from([1.0, 0.5, 1 / 3, 0.0, -2.5, 1e30]),
    with_stats=st.booleans(),
)
Described = list[tuple[list[int], str, torch.dtype, int]]


def check(
    described: Described,
    flat_dtype: torch.dtype,
    gap: int,
    scale: float,
    with_stats: bool,
    device: EmulatedDevice | None = None,
) -> None:
    """Compare the C++ library, or the CUDA kernels on the emulated device, with the reference."""
    tensors = [tensor_of(*each) for each in described]
    offsets, end = [], gap % 5
    for tensor in tensors:
        offsets.append(end)
        end += tensor.numel() + gap
    # Gradients may come with other strides than the plan was made for.
    given_tensors = [tensor.contiguous() if i % 3 == 2 else tensor for i, tensor in enumerate(tensors)]
    found = []
    for implementation in ("reference", "native"):
        flat = torch.full((end + 5,), 7.0, dtype=flat_dtype)
        with using(implementation):
            plan = FlattenPlan.for_bucket(tensors, flat, offsets)
        if device is not None and implementation == "native":
            plan._executor = CudaExecutor(tensors, flat, offsets, device)
        back = [torch.full_like(tensor, 7.0) for tensor in given_tensors]
        stats = [plan.flatten(given_tensors, scale, with_stats=with_stats)]
        stats += [plan.unflatten(back, scale, with_stats=with_stats)]
        found.append(([flat, *back], stats))
    (expected, of_reference), (ours, of_ours) = found
    assert all(same_bits(a, b) for a, b in zip(ours, expected, strict=True))
    for mine, theirs in zip(of_ours, of_reference, strict=True):
        if mine is not None and theirs is not None:
            assert mine.non_finite == theirs.non_finite
            rtol = 1e-6 if device is None else 1e-9
            torch.testing.assert_close(mine.sum_of_squares, theirs.sum_of_squares, rtol=rtol, atol=0, equal_nan=True)
        assert (mine is None) == (theirs is None) == (not with_stats)


@settings(max_examples=150, deadline=None, derandomize=True)
@CASES
def test_library_matches_reference(
    described: Described, flat_dtype: torch.dtype, gap: int, scale: float, with_stats: bool
) -> None:
    check(described, flat_dtype, gap, scale, with_stats)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    return EmulatedDevice(tmp_path_factory.mktemp("programs"))


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True)
@CASES
def test_cuda_matches_reference(
    device: EmulatedDevice, described: Described, flat_dtype: torch.dtype, gap: int, scale: float, with_stats: bool
) -> None:
    check(described, flat_dtype, gap, scale, with_stats, device)
