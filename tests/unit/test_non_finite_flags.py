"""Which gradients are not finite, for every dtype and layout, without waiting for a device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddp_compile.plan.spec import BucketSpec, GradientSpec
from ddp_compile.runtime.buckets.flat_buffer import FlatBuffer, non_finite_flags
from ddp_compile.runtime.comm import streams

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def tensors(dtype: torch.dtype) -> list[Tensor]:
    made = [torch.full(shape, 60000.0, dtype=dtype) for shape in ((3, 5), (7,), (), (0, 4), (2, 2))]
    made[0][2, 4] = float("inf")
    made[1][3] = float("nan")
    made[2].fill_(-float("inf"))
    return [made[0].t(), *made[1:]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype) -> None:
    assert non_finite_flags(tensors(dtype)).tolist() == [True, True, True, False, False]


def test_sparse_tensors() -> None:
    rows = torch.tensor([[0, 2, 2]])
    finite = torch.sparse_coo_tensor(rows, torch.ones(3, 4), (5, 4))
    assert non_finite_flags([finite]).tolist() == [False]
    assert non_finite_flags([finite * float("nan")]).tolist() == [True]
    assert non_finite_flags([torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, 4), (5, 4))]).tolist() == [False]


def buffer_of(dtype: torch.dtype) -> tuple[FlatBuffer, list[Tensor]]:
    parameters = [nn.Parameter(torch.empty_like(t)) for t in tensors(dtype)]
    name = str(dtype).removeprefix("torch.")
    gradients = tuple(GradientSpec(i, f"p{i}", p.numel(), name, "cpu") for i, p in enumerate(parameters))
    spec = BucketSpec(0, gradients, cap_bytes=1 << 20)
    return FlatBuffer(spec, parameters), [torch.zeros_like(p) for p in parameters]


@pytest.mark.parametrize("dtype", DTYPES)
def test_flags_of_a_flattened_buffer(dtype: torch.dtype) -> None:
    buffer, gradients = buffer_of(dtype)
    assert buffer.flatten(gradients, 0.5, checks_finite=True) is None
    assert buffer.flatten(tensors(dtype), 0.5) is None
    flags = buffer.flatten(tensors(dtype), 0.5, checks_finite=True)
    assert flags is not None and flags.tolist() == [True, True, True, False, False]


def test_flags_on_the_device() -> None:
    flags = non_finite_flags([t.to("meta") for t in tensors(torch.float32)])  # where asking for a value is an error
    assert flags.is_meta and flags.shape == (5,) and flags.dtype == torch.bool


def test_flags_of_finite_values(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, gradients = buffer_of(torch.float32)
    monkeypatch.setattr(streams, "has_streams", lambda device: True)
    flags = buffer.flatten(gradients, 0.5, checks_finite=True)
    assert flags is not None and flags.tolist() == [False] * 5
