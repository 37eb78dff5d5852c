"""Moving tensors into and out of a flat buffer, against arithmetic in double precision: each implementation."""

from collections.abc import Callable

import pytest
import torch
from kernel_values import DTYPES
from torch import Tensor, ones
from torch.autograd import forward_ad

from ddp_compile.kernels import FlattenPlan, flatten_scale, unflatten

pytestmark = pytest.mark.usefixtures("implementation")

SHAPES = [(3, 4), (), (5,), (0,), (2, 1, 3), (1,)]


def packed_double(tensors: list[Tensor], scale: float | Tensor) -> Tensor:
    return torch.cat([tensor.double().reshape(-1) for tensor in tensors]) * scale


@pytest.mark.parametrize("scale", [1.0, -2.0, torch.tensor(1 / 3, dtype=torch.float64)])
@pytest.mark.parametrize("flat_dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_flatten_and_unflatten(dtype: torch.dtype, flat_dtype: torch.dtype, scale: float | Tensor) -> None:
    tensors = [torch.randn(shape).to(dtype) for shape in [*SHAPES, (9001,)]]
    tensors.append(torch.randn(3, 4).to(dtype)[:, :2])
    expected = packed_double(tensors, scale)
    flat = torch.full_like(expected, float("nan"), dtype=flat_dtype)
    plan = FlattenPlan.for_bucket(tensors, flat)
    plan.flatten(tensors, scale)
    eps = max(torch.finfo(dtype).eps, torch.finfo(flat_dtype).eps)
    tiny = torch.finfo(flat_dtype).tiny  # subnormals have fewer digits
    torch.testing.assert_close(flat.double(), expected, rtol=eps, atol=tiny)
    back = [torch.full_like(tensor, float("nan")) for tensor in tensors]
    plan.unflatten(back, 3.0)
    atol = torch.finfo(dtype).tiny
    torch.testing.assert_close(packed_double(back, 1.0), flat.double() * 3, rtol=eps, atol=atol)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_forward_mode_derivatives_are_left_out(scale: float) -> None:
    """float64 is moved by torch's operators, which would refuse them, or take them along."""
    flat = torch.zeros(3, dtype=torch.float64)
    with forward_ad.dual_level():
        flatten_scale([forward_ad.make_dual(ones(3, dtype=torch.float64), ones(3, dtype=torch.float64))], flat, scale)
        assert forward_ad.unpack_dual(flat).tangent is None
    assert flat.tolist() == [scale] * 3


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_tensor_in_place_is_scaled(scale: float) -> None:
    flat = torch.arange(8.0)
    placed, other = flat[:3], torch.full((5,), 10.0)
    flatten_scale([placed, other], flat, scale)
    assert flat.tolist() == [0, scale, 2 * scale] + [10 * scale] * 5


def test_channels_last_view() -> None:
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    flat = torch.zeros(50)
    plan = FlattenPlan.for_bucket([weight], flat, offsets=[2])
    assert plan.views[0].stride() == weight.stride() and plan.views[0].storage_offset() == 2
    plan.flatten([weight], 0.5)
    assert torch.equal(plan.views[0], weight * 0.5)
    # In memory order, so that a copy into the buffer is one run.
    assert torch.equal(flat[2:], weight.permute(0, 2, 3, 1).reshape(-1) * 0.5)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_no_autograd(scale: float) -> None:
    parameter = torch.nn.Parameter(ones(4))
    flat = torch.zeros(4)
    flatten_scale([parameter], flat, scale)
    assert not flat.requires_grad and flat.tolist() == [scale] * 4
    unflatten(flat, [parameter], scale)
    assert parameter.is_leaf and parameter.tolist() == [scale * scale] * 4


@pytest.mark.parametrize(
    ("tensors", "flat", "offsets", "message"),
    [
        ([ones(2)], ones(2, 2), None, r"flat has shape \(2, 2\).* strides \(2, 1\); pass a contiguous 1-d"),
        ([ones(2)], ones(8)[::2], None, r"flat has shape \(4,\).* strides \(2,\)"),
        ([ones(2)], ones(2), [0, 2], "2 offsets were given for 1 tensors; give one for each"),
        ([ones(2, device="meta")], ones(2), None, "tensor 0 is on meta but flat is on cpu; move one of them"),
        ([ones(2), ones(3)], ones(4), None, "tensor 1 with 3 elements at offset 2 does not fit into flat"),
        ([ones(2)], ones(4), [3], "tensor 0 with 2 elements at offset 3 does not fit into flat with 4"),
        ([ones(2)], ones(4), [-1], "tensor 0 with 2 elements at offset -1 does not fit"),
        ([ones(3), ones(2)], ones(8), [3, 2], "tensors 1 and 0 overlap: 2 elements at offset 2 and 3 at offset 3"),
        ([ones(2)], ones(2, dtype=torch.int64), None, "flat is of torch.int64; gradients need a floating"),
        ([ones(2).int()], ones(2), None, "tensor 0 is of torch.int32; gradients need a floating dtype"),
    ],
)
def test_wrong_places_are_refused(tensors: list[Tensor], flat: Tensor, offsets: list[int] | None, message: str) -> None:
    before = flat.clone()
    with pytest.raises(ValueError, match=message):
        flatten_scale(tensors, flat, 1.0, offsets=offsets)
    with pytest.raises(ValueError, match=message):
        unflatten(flat, tensors, offsets=offsets)
    assert torch.equal(flat, before)


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ([ones(2)], ValueError, "1 tensors were given to a plan for 2"),
        ([ones(2), ones(3)], ValueError, r"tensor 1 has shape \(3,\) but its place in flat was made for \(2, 2\)"),
        ([ones(2), ones(4)], ValueError, r"tensor 1 has shape \(4,\) but its place"),
        ([ones(2), ones(2, 2, device="meta")], ValueError, "tensor 1 is on meta but flat is on cpu"),
        ([ones(2), ones(2, 2).int()], ValueError, "tensor 1 is of torch.int32"),
        ([ones(2), ones(2, 2).to_sparse()], ValueError, r"tensor 1 has layout torch.sparse_coo.*to_dense"),
        ([ones(2), None], TypeError, "tensor 1 is of type NoneType; pass torch tensors"),
    ],
)
def test_plan_refuses_other_tensors(tensors: list[Tensor], error: type[Exception], message: str) -> None:
    flat = torch.full((6,), 7.0)
    plan = FlattenPlan.for_bucket([ones(2), ones(2, 2)], flat)
    for call in (lambda: plan.flatten(tensors, 0.5), lambda: plan.unflatten(tensors)):
        with pytest.raises(error, match=message):
            call()
    assert flat.tolist() == [7.0] * 6


@pytest.mark.parametrize(
    ("astray", "tensors"),
    [
        (0, lambda flat: [flat[1:3], ones(2, 2)]),
        (1, lambda flat: [ones(2), flat[:4].view(2, 2)]),
        (1, lambda flat: [ones(2), flat[2:].view(2, 2).t()]),  # in its place, in another order
    ],
)
def test_astray_memory_is_refused(astray: int, tensors: Callable[[Tensor], list[Tensor]]) -> None:
    flat = torch.arange(6.0)
    plan = FlattenPlan.for_bucket([torch.zeros(2), torch.zeros(2, 2)], flat)
    for call in (plan.flatten, plan.unflatten):
        for scale in (1.0, 0.5):
            with pytest.raises(ValueError, match=f"tensor {astray} shares memory with flat but is not in its"):
                call(tensors(flat), scale)
    with pytest.raises(ValueError, match="tensor 0 shares memory with flat"):
        flatten_scale([flat[:1].expand(4)], flat, 0.5)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5]


def test_sources_may_share_memory() -> None:
    memory, flat = torch.arange(5.0), torch.zeros(6)
    flatten_scale([memory[:3], memory[2:]], flat, 2.0)
    assert flat.tolist() == [0, 2, 4, 4, 6, 8]


def test_one_version_for_each_write() -> None:
    """By which autograd notices that a tensor which it saved has been written, and `ParameterGate` other writes.

    Also for a tensor that torch's own operations write.
    """
    tensors = [ones(2), ones(6)[::2]]
    before = [tensor._version for tensor in tensors]
    FlattenPlan.for_bucket(tensors, torch.zeros(5)).unflatten(tensors, 0.5)
    assert [tensor._version for tensor in tensors] == [version + 1 for version in before]
