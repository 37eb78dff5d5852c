"""The C++ library against torch's operations, bit for bit, over random shapes, layouts, offsets and dtypes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_values import DTYPES, same_bits, values_of
from torch import Tensor

from ddp_compile.kernels import FlattenPlan

shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3) | st.tuples(st.integers(0, 700))
layouts = st.sampled_from(["contiguous", "transposed", "sliced", "unaligned"])


def make_tensor(shape: list[int], layout: str, dtype: torch.dtype, seed: int) -> Tensor:
    values = values_of(torch.Size(shape).numel(), dtype, seed)
    if layout == "transposed":
        return values.reshape(shape[::-1]).permute(list(range(len(shape)))[::-1])
    if layout == "sliced":
        wide = torch.zeros(*shape, 2, dtype=dtype)
        wide[..., 1] = values.reshape(shape)
        return wide[..., 1]
    if layout == "unaligned":
        return torch.cat([torch.zeros(1, dtype=dtype), values])[1:].view(shape)
    return values.reshape(shape)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    described=st.lists(st.tuples(shapes, layouts, st.sampled_from(DTYPES), st.integers(0, 99)), max_size=6),
    flat_dtype=st.sampled_from(DTYPES),
    gap=st.integers(0, 33),
    scale=st.sampled_from([1.0, 0.5, 1 / 3, 0.0, -2.5, 1e30]),
    with_stats=st.booleans(),
)
def test_every_bit_is_the_references(
    described: list[tuple[list[int], str, torch.dtype, int]],
    flat_dtype: torch.dtype,
    gap: int,
    scale: float,
    with_stats: bool,
) -> None:
    tensors = [make_tensor(list(shape), layout, dtype, seed) for shape, layout, dtype, seed in described]
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end + gap)
        end += gap + tensor.numel()
    flats, outputs, stats = [], [], []
    for implementation in (None, "reference"):
        flat = torch.full((end + 5,), 7.0, dtype=flat_dtype)
        plan = FlattenPlan.for_bucket(tensors, flat, offsets, implementation=implementation)
        stats.append(plan.flatten(tensors, scale, with_stats=with_stats))
        out = [torch.full_like(tensor, 7.0) for tensor in tensors]
        stats.append(plan.unflatten(out, scale, with_stats=with_stats))
        flats.append(flat)
        outputs.append(out)
    assert same_bits(*flats)
    assert all(same_bits(a.contiguous(), b.contiguous()) for a, b in zip(*outputs, strict=True))
    if with_stats:
        for ours, expected in ((stats[0], stats[2]), (stats[1], stats[3])):
            assert ours is not None and expected is not None
            torch.testing.assert_close(ours.sum_of_squares, expected.sum_of_squares, rtol=1e-6, atol=0, equal_nan=True)
            assert ours.non_finite == expected.non_finite
