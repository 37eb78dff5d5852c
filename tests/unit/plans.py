"""Gradients and plans that the tests of packing share."""

import random
from collections.abc import Sequence

from ddp_compile.plan.builder import PlanBuilder
from ddp_compile.plan.spec import BucketPlan, BucketSpec, GradientSpec


def gradient(index: int, numel: int, dtype: str = "float32", device: str = "cpu", sparse: bool = False) -> GradientSpec:
    return GradientSpec(index, f"p{index}", numel, dtype, device, sparse)


def gradients(*numels: int) -> list[GradientSpec]:
    return [gradient(i, numel) for i, numel in enumerate(numels)]


def members(buckets: Sequence[BucketSpec]) -> list[list[int]]:
    return [[g.index for g in bucket.gradients] for bucket in buckets]


def random_gradients(seed: int, num_gradients: int = 40) -> list[GradientSpec]:
    rng = random.Random(seed)
    return [
        gradient(i, rng.randint(1, 2000), rng.choice(["float32", "bfloat16"]), sparse=rng.random() < 0.1)
        for i in range(num_gradients)
    ]


def plan_in_frames(specs: Sequence[GradientSpec], *frames: Sequence[int], cap_bytes: int = 10**6) -> BucketPlan:
    builder = PlanBuilder(specs, [cap_bytes])
    for frame in frames:
        builder.add_frame(frame)
    return builder.propose()
