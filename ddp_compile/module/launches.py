"""When each bucket is launched, and why not earlier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_compile.compile.backend import GraphReport
from ddp_compile.plan.spec import BucketPlan, BucketSpec
from ddp_compile.report.explanation import BucketLaunch
from ddp_compile.runtime.buckets.bucket import Bucket

if TYPE_CHECKING:
    from ddp_compile.module.replicate_state import ReplicateState


def describe_launches(state: ReplicateState, plan: BucketPlan) -> tuple[BucketLaunch, ...]:
    """One for each bucket of a plan."""
    sealed = dict(enumerate(state.reducer.buckets))
    return tuple(
        BucketLaunch(bucket.index, *_launch(state, bucket, sealed.get(bucket.index))) for bucket in plan.buckets
    )


def _launch(state: ReplicateState, spec: BucketSpec, bucket: Bucket | None) -> tuple[bool, str]:
    """Whether a bucket is launched early, and where or why not."""
    if state.process_group.size() == 1:
        return False, "there is one rank, so nothing is sent"
    if not state.backend.reports and not state.regions.num_training_graphs:
        return False, "nothing has been compiled for training"
    indices = {gradient.index for gradient in spec.gradients}
    report = next((r for r in reversed(state.backend.reports) if _gets_gradients(r, indices)), None)
    if report is None:
        in_region = not indices.isdisjoint(state.builder.region_of)
        return True, "after the backward of a region" if in_region else "by hooks, as the gradients come"
    # The backward of the first partition that reads a parameter of the bucket comes last.
    first = next((i for i, part in enumerate(report.parts) if not indices.isdisjoint(part.reads)), 0)
    if first > 0:
        return True, "after the backward of a partition"
    if report.launches_in_backward and bucket is not None and bucket.may_launch_early:
        return True, "inside the compiled backward"
    if spec.frame:  # frames before this one have a backward to come
        return True, "after the backward of a graph"
    return False, _why_not(report, indices, bucket)


def _why_not(report: GraphReport, indices: set[int], bucket: Bucket | None) -> str:
    """Why a bucket is launched at the end of the backward."""
    if bucket is not None and bucket.was_launched_too_early:
        return "another gradient came after it had been launched, so its hooks launch it"
    if len(report.parts) > 1:
        return "all gradients are there only when the backward of the graph ends"
    numbers = [bucket.index for bucket in report.buckets if not indices.isdisjoint(g.index for g in bucket.gradients)]
    of_it = [declined for declined in report.declined if declined.bucket in numbers]
    if of_it:
        return "; ".join(f"it {declined.reason.removeprefix(f'bucket {declined.bucket} ')}" for declined in of_it)
    if not report.launches_in_backward:
        return "the graph has one bucket" if len(report.buckets) == 1 else "the graph is not cut"
    if bucket is None:
        return "the first reduced backward shows whether that is safe"
    return "when watched, it had gradients from elsewhere than this graph too, or hooks saw them"


def _gets_gradients(report: GraphReport, indices: set[int]) -> bool:
    return any(not indices.isdisjoint(g.index for g in bucket.gradients) for bucket in report.buckets)
