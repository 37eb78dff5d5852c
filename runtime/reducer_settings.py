"""What a reducer needs to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddp_compile.bucket_plan import BucketPlan
from ddp_compile.runtime.algorithms.base import CommAlgorithm
from ddp_compile.runtime.progress import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducerSettings:
    """What a reducer needs to know beside its parameters.

    Args:
        gradient_as_bucket_view: See `BucketBuffer`.
        find_unused_parameters: Let buckets leave without the gradients that a backward does not bring.
        static_graph: Learn from the first round which gradients come, and how often; every later round is the same.
        takes_whole_buckets: Let buckets leave inside compiled backwards that offer them; the same on every rank.
        algorithm: How a bucket is reduced.
        progress: What ranks tell each other while they train.
        on_plan_sealed: Called once, on every rank, with the plan all ranks agreed on.
    """

    gradient_as_bucket_view: bool
    find_unused_parameters: bool
    static_graph: bool
    takes_whole_buckets: bool
    algorithm: CommAlgorithm
    progress: Progress
    on_plan_sealed: Callable[[BucketPlan], None]
