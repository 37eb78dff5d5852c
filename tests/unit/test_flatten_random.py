"""The C++ library against torch's operations, bit for bit, over random shapes, layouts, offsets and dtypes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_compile.kernels import FlattenPlan

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3) | st.tuples(st.integers(0, 700))
layouts = st.sampled_from(["contiguous", "transposed", "sliced", "unaligned"])
# Beside ordinary numbers: subnormals of each format, values that overflow in half precision, ties, signed zeros.
SPECIAL = [0.0, -0.0, 1e-45, 6e-8, 2.98e-8, 6.1e-5, 65504.0, 65519.99, 65520.0, 3.39e38, -3.4e38, 1.00390625, 2.0**-25]
SPECIAL += [float("inf"), -float("inf"), float("nan")]


def make_tensor(shape: list[int], layout: str, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-9, 9, (numel,), generator=generator)
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (numel,), generator=generator)]
    values = torch.where(torch.rand(numel, generator=generator) < 0.2, special, values).to(dtype)
    if layout == "transposed":
        return values.reshape(shape[::-1]).permute(list(range(len(shape)))[::-1])
    if layout == "sliced":
        wide = torch.zeros(*shape, 2, dtype=dtype)
        wide[..., 1] = values.reshape(shape)
        return wide[..., 1]
    if layout == "unaligned":
        return torch.cat([torch.zeros(1, dtype=dtype), values])[1:].view(shape)
    return values.reshape(shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, signs of zeros included; any NaN equals any other."""
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}[a.dtype]
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


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
            # Squares are summed in float32 for a while: where one overflows there, the sum is infinite.
            if expected.sum_of_squares < 1e38:
                torch.testing.assert_close(ours.sum_of_squares, expected.sum_of_squares, rtol=1e-6, atol=1e-38)
            assert ours.non_finite == expected.non_finite


def test_every_half_precision_value_and_every_tie_between_two() -> None:
    """All 65536 bit patterns as sources; as destinations, all neighbours' midpoints and the values beside those."""
    for dtype in (torch.bfloat16, torch.float16):
        patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
        widened = torch.empty(65536)
        FlattenPlan([patterns], widened).flatten([patterns], 1.0)
        assert same_bits(widened, patterns.float())
        finite = patterns[patterns.isfinite() & (patterns >= 0)].double().sort().values
        midpoints = ((finite[1:] + finite[:-1]) / 2).float()
        around = torch.cat([midpoints, *(torch.nextafter(midpoints, torch.tensor(to)) for to in (0.0, float("inf")))])
        around = torch.cat([around, -around])
        narrowed = torch.empty(len(around), dtype=dtype)
        FlattenPlan([around], narrowed, implementation="native").flatten([around], 1.0)
        assert same_bits(narrowed, around.to(dtype))


def test_the_sum_of_squares_overflows_to_infinity_and_says_so() -> None:
    values = torch.full((100,), 1e30)
    stats = FlattenPlan([values], torch.empty(100), implementation="native").flatten([values], 1.0, with_stats=True)
    assert stats is not None
    assert stats.sum_of_squares.isinf() and not stats.non_finite


def test_several_threads_write_what_one_does() -> None:
    tensors = [torch.randn(n) for n in (1_000_000, 3, 700_001, 1_500_000)]
    flats, sums = [], []
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 3, 7):
            torch.set_num_threads(threads)
            flat = torch.empty(sum(t.numel() for t in tensors), dtype=torch.bfloat16)
            stats = FlattenPlan(tensors, flat, implementation="native").flatten(tensors, 0.3, with_stats=True)
            assert stats is not None
            flats.append(flat)
            sums.append(stats.sum_of_squares)
    finally:
        torch.set_num_threads(num_threads)
    assert all(same_bits(flat, flats[0]) for flat in flats[1:])
    torch.testing.assert_close(torch.stack(sums), sums[0].expand(3), rtol=1e-7, atol=0)
