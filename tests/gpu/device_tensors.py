"""Tensors on a CUDA device for the tests of the kernels, and expected results, computed in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POISON = 77.0

# Subnormals of each format, values that overflow in half precision, ties, signed zeros.
SPECIAL = [0.0, -0.0, 1e-45, 6e-8, 2.98e-8, 6.1e-5, 65504.0, 65519.99, 65520.0, 1.00390625, 2.0**-25, -3e4]
NON_FINITE = [float("inf"), -float("inf"), float("nan")]

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def values_of(
    numel: int, dtype: torch.dtype, seed: int = 0, misaligned_by: int = 0, special: Sequence[float] = SPECIAL
) -> Tensor:
    """Random values over many powers of ten, some of them special, ``misaligned_by`` elements into their memory."""
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"generator": generator, "device": "cuda"}
    numel += misaligned_by
    values = torch.randn(numel, **options) * 10.0 ** torch.randint(-6, 4, (numel,), **options)
    chosen = torch.tensor(special, device="cuda")[torch.randint(len(special), (numel,), **options)]
    return torch.where(torch.rand(numel, **options) < 0.1, chosen, values).to(dtype)[misaligned_by:]


def rounded_product(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The product with ``scale`` as float32, rounded to float32 and then to ``dtype``: in float64 it is exact."""
    return (values.double() * torch.tensor(scale, dtype=torch.float32).double().item()).float().to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, signs of zeros included; any NaN equals any other."""
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}[a.dtype]
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())
