"""Whole plans, bit for bit those of torch's operations, over random shapes, layouts, offsets and dtypes."""

import pytest
import torch
from cuda_emulation import EmulatedDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import check_moves
from kernel_values import DTYPES, LAYOUTS, tensor_of

SHAPES = st.lists(st.integers(0, 7), max_size=3) | st.tuples(st.integers(0, 700) | st.sampled_from([8192, 8193]))
# The kernels leave float64, transposed and strided tensors to torch, in one plan with the others.
TENSORS = st.tuples(SHAPES, st.sampled_from(LAYOUTS), st.sampled_from([*DTYPES, torch.float64]), st.integers(0, 99))
CASES = given(
    described=st.lists(TENSORS, max_size=6),
    flat_dtype=st.sampled_from(DTYPES),
    gap=st.integers(0, 33),
    scale=st.sampled_from([1.0, 0.5, 1 / 3, 0.0, -2.5, 1e30]),
)
Described = list[tuple[list[int], str, torch.dtype, int]]


def check(
    described: Described, flat_dtype: torch.dtype, gap: int, scale: float, device: EmulatedDevice | None = None
) -> None:
    """Compare the C++ library, or the CUDA kernels on the emulated device, with the reference."""
    tensors = [tensor_of(*each) for each in described]
    offsets, end = [], gap % 5
    for tensor in tensors:
        offsets.append(end)
        end += tensor.numel() + gap
    # Gradients may come with other strides than the plan was made for.
    given_tensors = [tensor.contiguous() if i % 3 == 2 else tensor for i, tensor in enumerate(tensors)]
    flat = torch.full((end + 5,), 7.0, dtype=flat_dtype)
    check_moves(tensors, flat, offsets, scale, device, given_tensors)


@settings(max_examples=150, deadline=None, derandomize=True)
@CASES
def test_library_matches_reference(described: Described, flat_dtype: torch.dtype, gap: int, scale: float) -> None:
    check(described, flat_dtype, gap, scale)


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True)
@CASES
def test_cuda_matches_reference(
    emulated_device: EmulatedDevice, described: Described, flat_dtype: torch.dtype, gap: int, scale: float
) -> None:
    check(described, flat_dtype, gap, scale, emulated_device)
