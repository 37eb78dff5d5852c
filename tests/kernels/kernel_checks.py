"""Comparisons of the C++ library, or of the CUDA kernels on a device that takes CPU tensors, with the reference."""

import functools
from collections.abc import Sequence

import kernel_values
import torch
from kernel_values import FINITE, same_bits, using
from torch import Tensor

from ddp_compile.kernels import FlattenPlan, codec
from ddp_compile.kernels.cuda.module import KernelDevice

POISON = 77.0

values_of = functools.partial(kernel_values.values_of, special=FINITE, exponents=(-6, 4))


def check_moves(
    tensors: Sequence[Tensor],
    flat: Tensor,
    offsets: list[int] | None = None,
    scale: float | Tensor = 1 / 3,
    device: KernelDevice | None = None,
    given: Sequence[Tensor] | None = None,
) -> None:
    """Flatten and unflatten tensors that kernels can move, or those that are ``given`` to a plan for ``tensors``."""
    found = []
    for implementation in ("reference", "native" if device is None else "cuda"):
        own = flat.clone()
        with using(implementation, device):
            plan = FlattenPlan.for_bucket(tensors, own, offsets)
        if implementation != "reference" and given is None:
            assert list(plan._executor.read(tensors, own, written=False)) == []
        back = [_copied(tensor) for tensor in given or tensors]
        plan.flatten(given or tensors, scale)
        plan.unflatten(back, float(scale))
        found.append([own, *back])
    assert all(map(same_bits, *found))


def check_codec(values: Tensor, num_chunks: int, dtype: torch.dtype, device: KernelDevice | None = None) -> None:
    """Compress, each chunk left out in turn too, decompress to a dtype, and add."""
    found = []
    for implementation in ("reference", "native" if device is None else "cuda"):
        misaligned_by = len(values) % 3
        out = torch.full((misaligned_by + len(values),), POISON, dtype=dtype)[misaligned_by:]
        with using(implementation, device):
            rows = codec.compress(values, num_chunks, None)
            codec.decompress(rows, out, accumulate=False)
            added = out.clone()
            codec.decompress(rows, added, accumulate=True)
            partial = [codec.compress(values, num_chunks, i) for i in range(num_chunks)]
        others = [torch.arange(num_chunks) != i for i in range(num_chunks)]
        found.append(([rows, *(part[kept] for part, kept in zip(partial, others, strict=True))], [out, added]))
    (expected_rows, expected), (rows, outs) = found
    assert all(map(torch.equal, rows, expected_rows))
    assert all(map(same_bits, outs, expected))


def check_average(values: Sequence[Tensor], device: KernelDevice | None = None) -> None:
    """``values`` are x, total and copy."""
    found = []
    for implementation in ("reference", "native" if device is None else "cuda"):
        x, total, copy = _copied(values[0]), *values[1:]
        with using(implementation, device):
            codec.average_into(x, total, copy, 3)
        found.append(x)
    assert same_bits(*found)


def check_add_rows(rows: Tensor, device: KernelDevice | None = None) -> None:
    found = []
    for implementation in ("reference", "native" if device is None else "cuda"):
        out = torch.full(rows.shape[1:], POISON, dtype=rows.dtype)
        with using(implementation, device):
            codec.add_rows(rows, out, 1 / 3)
        found.append(out)
    assert same_bits(*found)


def _copied(tensor: Tensor) -> Tensor:
    """With the strides and the alignment of the tensor."""
    memory = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(tensor)
