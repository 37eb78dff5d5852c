"""When each bucket is launched, and why not earlier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddp_compile.compile.graph_report import GraphReport
from ddp_compile.plan.spec import BucketPlan, BucketSpec
from ddp_compile.report.explanation import BucketLaunch

if TYPE_CHECKING:
    from ddp_compile.module.replicate_state import ReplicateState


#: Why a bucket that a compiled backward computes is launched by its hooks.
TOO_EARLY = "another gradient came after it had been launched, or hooks see its gradients, so its hooks launch it"


def buckets_of_hooks(state: ReplicateState) -> dict[int, str]:
    """The buckets that compiled backwards must leave to their hooks, and why."""
    algorithm = state.reducer.algorithm
    if not algorithm.traits.replayable:
        return dict.fromkeys(
            range(len(state.builder.propose().buckets)), f"the {algorithm.name} must not be called twice for a bucket"
        )
    return {index: TOO_EARLY for index, bucket in enumerate(state.reducer.buckets) if bucket.was_launched_too_early}


def describe_launches(state: ReplicateState, plan: BucketPlan, of_hooks: Mapping[int, str]) -> tuple[BucketLaunch, ...]:
    """One for each bucket of a plan.

    Args:
        state: The module's.
        plan: Its plan, or the plan so far.
        of_hooks: As from `buckets_of_hooks`.
    """
    return tuple(BucketLaunch(bucket.index, *_launch(state, bucket, of_hooks)) for bucket in plan.buckets)


def _launch(state: ReplicateState, bucket: BucketSpec, of_hooks: Mapping[int, str]) -> tuple[bool, str]:
    """Whether a bucket is launched early, and where or why not."""
    if state.process_group.size() == 1 and not state.reducer.algorithm.traits.beyond_group:
        return False, "there is one rank, so nothing is sent"
    if not state.backend.reports and not state.regions.num_training_graphs:
        return False, "nothing has been compiled for training"
    indices = {gradient.index for gradient in bucket.gradients}
    report = next((r for r in reversed(state.backend.reports) if _gets_gradients(r, indices)), None)
    if report is None:
        in_region = not indices.isdisjoint(state.builder.region_of)
        return True, "after the backward of a region" if in_region else "by hooks, as the gradients come"
    # The backward of the first partition that reads a parameter of the bucket comes last.
    first = next((i for i, part in enumerate(report.parts) if not indices.isdisjoint(part.reads)), 0)
    if first > 0:
        return True, "after the backward of a partition"
    declined = _declined(report, indices)
    if report.launches_in_backward and not declined and bucket.index not in of_hooks:
        return True, "inside the compiled backward"
    if bucket.frame:  # frames before this one have a backward to come
        return True, "after the backward of a graph"
    if len(report.parts) > 1 or len(report.buckets) == 1:
        return False, "all gradients are there only when the backward of the graph ends"
    if declined:
        return False, declined
    if not report.launches_in_backward:
        return False, "the graph is not cut"
    return False, of_hooks[bucket.index]


def _declined(report: GraphReport, indices: set[int]) -> str:
    """Why passes left a bucket to its hooks; empty if they did not."""
    numbers = [bucket.index for bucket in report.buckets if not indices.isdisjoint(g.index for g in bucket.gradients)]
    of_it = [declined for declined in report.declined if declined.bucket in numbers]
    return "; ".join(f"it {declined.reason.removeprefix(f'bucket {declined.bucket} ')}" for declined in of_it)


def _gets_gradients(report: GraphReport, indices: set[int]) -> bool:
    return any(not indices.isdisjoint(g.index for g in bucket.gradients) for bucket in report.buckets)
