"""Implementations and values for the tests of the kernels, and comparisons of results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_compile import kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

#: In addition to ordinary numbers: subnormals of each format, values that overflow in half precision, ties, signed
#: zeros.
FINITE = [0.0, -0.0, 1e-45, 6e-8, 2.98e-8, 6.1e-5, 65504.0, 65519.99, 1.00390625, 2.0**-25, -3e4]
SPECIAL = [*FINITE, 65520.0, 3.39e38, -3.4e38, float("inf"), -float("inf"), float("nan")]
LAYOUTS = ("contiguous", "transposed", "strided", "unaligned")


def values_of(
    numel: int,
    dtype: torch.dtype,
    seed: int = 0,
    misaligned_by: int = 0,
    special: Sequence[float] = SPECIAL,
    exponents: tuple[int, int] = (-9, 9),
) -> Tensor:
    """Numbers over many orders of magnitude, a fifth of them special, ``misaligned_by`` elements into their memory."""
    generator = torch.Generator().manual_seed(seed)
    numel += misaligned_by
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(*exponents, (numel,), generator=generator)
    chosen = torch.tensor(special)[torch.randint(len(special), (numel,), generator=generator)]
    return torch.where(torch.rand(numel, generator=generator) < 0.2, chosen, values).to(dtype)[misaligned_by:]


def every_alignment(numels: Sequence[int], dtype: torch.dtype) -> tuple[list[Tensor], list[int], int]:
    """Finite tensors of each size that begin at each of eight remainders of elements, and places that do.

    Returns:
        The tensors, the offsets of their places, with gaps between them, and the elements of the flat buffer.
    """
    tensors, offsets, end = [], [], 0
    for misaligned_by, remainder, numel in itertools.product(range(8), range(8), numels):
        tensors.append(values_of(numel, dtype, len(tensors), misaligned_by, FINITE, (-6, 4)))
        offsets.append(end + 1 + (remainder - end - 1) % 8)
        end = offsets[-1] + numel
    return tensors, offsets, end + 1


def tensor_of(shape: Sequence[int], layout: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Such values in one of `LAYOUTS`."""
    values = values_of(torch.Size(shape).numel(), dtype, seed, misaligned_by=layout == "unaligned")
    if layout == "transposed":
        return values.reshape(shape[::-1]).permute(list(range(len(shape)))[::-1])
    if layout == "strided":
        return torch.stack([values.reshape(shape)] * 2, dim=-1)[..., 1]
    return values.view(shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, signs of zeros included; any NaN equals any other."""
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    return bool(((a.contiguous().view(bits) == b.contiguous().view(bits)) | (a.isnan() & b.isnan())).all())


#: Names that `NativeLibrary.instruction_sets` has on x86 processors.
INSTRUCTION_SETS = ("avx512", "avx2", "baseline")
#: What is built elsewhere: the macro that makes any compiler build the same here, and the only instruction set then.
OTHER_BUILDS = {
    "other processors": ("DDP_COMPILE_NO_INTRINSICS", "baseline"),
    "other compilers": ("DDP_COMPILE_PLAIN_LOOPS", "plain"),
}


@dataclass(frozen=True)
class Asked:
    """The kernels with one ``implementation``, as a caller would ask for it."""

    implementation: str | None

    def flatten_scale(self, tensors: Sequence[Tensor], flat: Tensor, scale: float, **options: Any) -> Any:
        return kernels.flatten_scale(tensors, flat, scale, implementation=self.implementation, **options)

    def unflatten(self, flat: Tensor, tensors: Sequence[Tensor], scale: float = 1.0, **options: Any) -> Any:
        return kernels.unflatten(flat, tensors, scale, implementation=self.implementation, **options)

    def plan(
        self, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int] | None = None
    ) -> kernels.FlattenPlan:
        return kernels.FlattenPlan.for_bucket(tensors, flat, offsets, implementation=self.implementation)

    def compress(self, values: Tensor, num_chunks: int = 1, skip_chunk: int | None = None) -> Tensor:
        return kernels.minmax_u8_compress(values, num_chunks, skip_chunk=skip_chunk, implementation=self.implementation)

    def decompress(self, compressed: Tensor, out: Tensor, accumulate: bool = False) -> None:
        kernels.minmax_u8_decompress(compressed, out, accumulate=accumulate, implementation=self.implementation)

    def average_into(self, x: Tensor, total: Tensor, copy: Tensor, count: float) -> None:
        kernels.average_into(x, total, copy, count, implementation=self.implementation)
