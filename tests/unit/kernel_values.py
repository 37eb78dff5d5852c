"""Values for the tests of the kernels, and how to compare what comes out."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Beside ordinary numbers: subnormals of each format, values that overflow in half precision, ties, signed zeros.
SPECIAL = [0.0, -0.0, 1e-45, 6e-8, 2.98e-8, 6.1e-5, 65504.0, 65519.99, 65520.0, 3.39e38, -3.4e38, 1.00390625, 2.0**-25]
SPECIAL += [float("inf"), -float("inf"), float("nan")]


def values_of(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers over many orders of magnitude, a fifth of them special."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-9, 9, (numel,), generator=generator)
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (numel,), generator=generator)]
    return torch.where(torch.rand(numel, generator=generator) < 0.2, special, values).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, signs of zeros included; any NaN equals any other."""
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}[a.dtype]
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())
