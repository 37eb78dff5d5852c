"""Kernels that move gradients between parameters and flat buffers."""

from ddp_compile.kernels.ops import FlattenPlan, flatten_scale, unflatten

__all__ = ["FlattenPlan", "flatten_scale", "unflatten"]
