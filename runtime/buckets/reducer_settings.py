"""The settings of a reducer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm
from ddp_compile.runtime.desync.monitor import DesyncMonitor


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducerSettings:
    """The settings of a reducer, apart from its parameters and their plan.

    Args:
        gradient_as_bucket_view: See `Bucket`.
        lazy_bucket_allocation: See `Bucket`.
        find_unused_parameters: Launch buckets without the gradients that a backward does not bring.
        skip_all_reduce_unused_params: Never again send a bucket that no rank uses in the first iteration.
        static_graph: Learn from the first iteration which gradients come, and how often. All later ones are the same.
        check_finite_gradients: Raise on every rank if a gradient of any rank is infinite or NaN.
        launches_in_backward: Launch buckets inside compiled backwards that compute them; the same on every rank.
        algorithm: Reduces the buckets.
        monitor: Compares the ranks while they train.
        on_reduced: Called when every ``.grad`` of an iteration is final, before the backward returns.
        on_plan_sealed: Called once, on every rank, with the plan all ranks agreed on.
    """

    gradient_as_bucket_view: bool
    lazy_bucket_allocation: bool
    find_unused_parameters: bool
    skip_all_reduce_unused_params: bool
    static_graph: bool
    check_finite_gradients: bool
    launches_in_backward: bool
    algorithm: CommAlgorithm
    monitor: DesyncMonitor
    on_reduced: Callable[[], None]
    on_plan_sealed: Callable[[BucketPlan], None]
