"""Kernels that move gradients between parameters and flat buffers, and compress them; see docs/kernels.md."""

from ddp_compile.kernels.executors import KernelStatus, status
from ddp_compile.kernels.flatten_plan import FlattenPlan
from ddp_compile.kernels.ops import (
    add_rows,
    average_into,
    flatten_scale,
    minmax_u8_compress,
    minmax_u8_decompress,
    unflatten,
)

__all__ = [
    "FlattenPlan",
    "KernelStatus",
    "add_rows",
    "average_into",
    "flatten_scale",
    "minmax_u8_compress",
    "minmax_u8_decompress",
    "status",
    "unflatten",
]
