"""Values for the tests of the kernels, comparisons of results, and a way to run the reference."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

from ddp_compile.kernels import executors
from ddp_compile.kernels.cuda import elementwise as cuda_elementwise
from ddp_compile.kernels.cuda import executor as cuda_executor
from ddp_compile.kernels.cuda.module import KernelDevice
from ddp_compile.kernels.native import library

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
    device: str = "cpu",
) -> Tensor:
    """Numbers over many orders of magnitude, a fifth of them special, ``misaligned_by`` elements into their memory."""
    options = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    numel += misaligned_by
    values = torch.randn(numel, **options) * 10.0 ** torch.randint(*exponents, (numel,), **options)
    chosen = torch.tensor(special, device=device)[torch.randint(len(special), (numel,), **options)]
    return torch.where(torch.rand(numel, **options) < 0.2, chosen, values).to(dtype)[misaligned_by:]


def every_alignment(numels: Sequence[int], dtype: torch.dtype) -> tuple[list[Tensor], list[int], int]:
    """Finite tensors that begin at each of eight remainders of elements, offsets that do, and the buffer's elements."""
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


#: Names that ``instruction_sets`` of tests/kernels/conftest.py has on x86 processors.
INSTRUCTION_SETS = ("avx512", "avx2", "baseline")
#: What is built elsewhere: the macro that makes any compiler build the same here, and the only instruction set then.
OTHER_BUILDS = {
    "other processors": ("DDP_COMPILE_NO_INTRINSICS", "baseline"),
    "other compilers": ("DDP_COMPILE_PLAIN_LOOPS", "plain"),
}


@contextmanager
def using(implementation: str, device: KernelDevice | None = None) -> Iterator[None]:
    """Inside, "native", "reference", or "cuda" on a ``device`` that takes CPU tensors, are the kernels on the CPU."""
    library.load()  # nothing may pass because it is missing
    with ExitStack() as patches:
        if implementation != "native":
            available = (implementation, "the test asks for it")
            patches.enter_context(mock.patch.object(executors, "available", lambda _: available))
        if implementation == "cuda":
            for module in (cuda_executor, cuda_elementwise):
                patches.enter_context(mock.patch.object(module, "kernel_device", lambda _: device))
        yield
