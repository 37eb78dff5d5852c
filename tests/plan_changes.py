"""Replaces the bucket plan of a model, as ``bucket_cap_mb="auto"`` does."""

from __future__ import annotations

from typing import Any

from ddp_compile.module.mixin import state_of
from ddp_compile.plan.packing import pack
from ddp_compile.plan.spec import BucketPlan, renumbered


def replace_plan(model: Any, cap_mb: float) -> None:
    """Between two steps, on every rank; does nothing before the first backward."""
    state = state_of(model)
    if state.reducer.buckets:
        buckets = pack(
            reversed(state.builder.gradients), [max(1, int(cap_mb * 2**20))], state.builder.layout, frame=None
        )
        state.reducer.replace_plan(BucketPlan(renumbered(buckets), model.bucket_plan.generation + 1))
