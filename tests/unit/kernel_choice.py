"""What the tests of the kernels run on: the C++ library with each kind of loops, or torch's operations alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ddp_compile import kernels

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
