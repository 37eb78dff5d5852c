"""Moving tensors into and out of a flat buffer: the reference kernels, against arithmetic in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddp_compile.kernels import FlattenPlan, flatten_scale, unflatten
from ddp_compile.kernels.ops import is_non_overlapping_and_dense

SHAPES = [(3, 4), (), (5,), (0,), (2, 1, 3), (1,)]


def random_tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def num_elements(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def packed_double(tensors: list[Tensor], scale: float) -> Tensor:
    return torch.cat([tensor.double().reshape(-1) for tensor in tensors]) * scale


@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3, 0.0, -2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_flatten_writes_every_element_times_the_scale(dtype: torch.dtype, scale: float) -> None:
    tensors = random_tensors(dtype)
    flat = torch.full((num_elements(tensors),), float("nan"), dtype=dtype)
    flatten_scale(tensors, flat, scale)
    torch.testing.assert_close(flat.double(), packed_double(tensors, scale), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unflatten_brings_back_what_flatten_wrote(dtype: torch.dtype, scale: float) -> None:
    tensors = random_tensors(dtype)
    flat = torch.empty(num_elements(tensors), dtype=dtype)
    flatten_scale(tensors, flat, scale)
    back = [torch.full_like(tensor, float("nan")) for tensor in tensors]
    unflatten(flat, back, 1 / scale)  # a power of two, so scaling is exact
    assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.half)],
)
def test_both_ways_cast_to_the_dtype_they_write(source: torch.dtype, target: torch.dtype, scale: float) -> None:
    tensors = random_tensors(source)
    flat = torch.empty(num_elements(tensors), dtype=target)
    flatten_scale(tensors, flat, scale)
    eps = max(torch.finfo(source).eps, torch.finfo(target).eps)
    torch.testing.assert_close(flat.double(), packed_double(tensors, scale), rtol=eps, atol=0)
    back = [torch.empty_like(tensor) for tensor in tensors]
    unflatten(flat, back)
    torch.testing.assert_close(packed_double(back, 1.0), flat.double(), rtol=eps, atol=0)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_gaps_between_offsets_are_left_alone(scale: float) -> None:
    tensors = [torch.ones(3), torch.ones(2)]
    flat = torch.full((16,), 7.0)
    flatten_scale(tensors, flat, scale, offsets=[2, 9])
    s = scale
    assert flat.tolist() == [7, 7, s, s, s, 7, 7, 7, 7, s, s, 7, 7, 7, 7, 7]
    flat[[0, 1, 5, 8, 11]] = float("nan")
    back = [torch.zeros(3), torch.zeros(2)]
    unflatten(flat, back, offsets=[2, 9])
    assert torch.cat(back).tolist() == [s] * 5


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_tensor_that_lies_in_its_place_already_is_only_scaled(scale: float) -> None:
    flat = torch.arange(8.0)
    placed, other = flat[:3], torch.full((5,), 10.0)
    flatten_scale([placed, other], flat, scale)
    assert flat.tolist() == [0, scale, 2 * scale] + [10 * scale] * 5


def test_a_channels_last_weight_gets_a_view_of_its_own_strides() -> None:
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    flat = torch.zeros(50)
    plan = FlattenPlan.for_bucket([weight], flat, offsets=[2])
    assert plan.views[0].stride() == weight.stride() and plan.views[0].storage_offset() == 2
    plan.flatten([weight], 0.5)
    assert torch.equal(plan.views[0], weight * 0.5)
    # In memory order, so that a copy into the buffer is one run.
    assert torch.equal(flat[2:], weight.permute(0, 2, 3, 1).reshape(-1) * 0.5)


def test_a_tensor_with_gaps_gets_a_contiguous_view() -> None:
    sliced = torch.arange(12.0).view(3, 4)[:, :2]
    flat = torch.zeros(6)
    plan = FlattenPlan.for_bucket([sliced], flat)
    assert plan.views[0].is_contiguous()
    plan.flatten([sliced], 1.0)
    assert flat.tolist() == [0, 1, 4, 5, 8, 9]
    plan.unflatten([sliced], 2.0)
    assert sliced.tolist() == [[0, 2], [8, 10], [16, 18]]


def test_gradients_of_other_strides_than_the_plans_are_taken() -> None:
    weight = torch.randn(3, 4)
    plan = FlattenPlan.for_bucket([weight], torch.zeros(12))
    for scale in (1.0, 0.5):
        plan.flatten([weight.t().contiguous().t()], scale)
        assert torch.equal(plan.views[0], weight * scale)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_neither_way_records_gradients(scale: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    flat = torch.zeros(4)
    flatten_scale([parameter], flat, scale)
    assert not flat.requires_grad and flat.tolist() == [scale] * 4
    unflatten(flat, [parameter], scale)
    assert parameter.is_leaf and parameter.tolist() == [scale * scale] * 4


def test_infinities_and_nans_pass_through() -> None:
    flat = torch.zeros(3)
    flatten_scale([torch.tensor([float("inf"), -float("inf"), float("nan")])], flat, 0.5)
    assert flat[0] == float("inf") and flat[1] == -float("inf") and flat[2].isnan()


def test_no_tensors_write_nothing() -> None:
    flat = torch.ones(2)
    flatten_scale([], flat, 0.5)
    unflatten(flat, [])
    assert flat.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("tensors", "flat", "offsets", "message"),
    [
        (
            [torch.ones(2)],
            torch.ones(2, 2),
            None,
            r"flat has shape \(2, 2\).* strides \(2, 1\); pass a contiguous 1-d",
        ),
        ([torch.ones(2)], torch.ones(8)[::2], None, r"flat has shape \(4,\).* strides \(2,\)"),
        ([torch.ones(2)], torch.ones(2), [0, 2], "2 offsets were given for 1 tensors; give one for each"),
        (
            [torch.ones(2, device="meta")],
            torch.ones(2),
            None,
            "tensor 0 is on meta but flat is on cpu; move one of them",
        ),
        (
            [torch.ones(2), torch.ones(3)],
            torch.ones(4),
            None,
            "tensor 1 with 3 elements at offset 2 does not fit into flat",
        ),
        ([torch.ones(2)], torch.ones(4), [3], "tensor 0 with 2 elements at offset 3 does not fit into flat with 4"),
        ([torch.ones(2)], torch.ones(4), [-1], "tensor 0 with 2 elements at offset -1 does not fit"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_values(
    tensors: list[Tensor], flat: Tensor, offsets: list[int] | None, message: str
) -> None:
    before = flat.clone()
    with pytest.raises(ValueError, match=message):
        flatten_scale(tensors, flat, 1.0, offsets=offsets)
    with pytest.raises(ValueError, match=message):
        unflatten(flat, tensors, offsets=offsets)
    assert torch.equal(flat, before)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(3, 4).t(), True),
        (torch.ones(2, 3, 4).permute(1, 2, 0), True),
        (torch.ones(()), True),
        (torch.ones(3, 1, 4)[:, :, :], True),
        (torch.ones(3, 4)[:, :2], False),
        (torch.ones(3, 4)[::2], False),
        (torch.ones(3, 1).expand(3, 4), False),
    ],
)
def test_dense_tensors_are_those_without_gaps_or_overlap(tensor: Tensor, expected: bool) -> None:
    assert is_non_overlapping_and_dense(tensor) is expected
