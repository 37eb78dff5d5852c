"""What ``model.explain()`` says."""

from __future__ import annotations

from ddp_compile.compile.backend import GraphReport
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.replicate_state import ReplicateState


def explain(state: ReplicateState, plan: BucketPlan) -> str:
    """The bucket table, how each graph was cut or shared, which cuts were declined, and what could not be compiled."""
    failures = [f"{failure.graph} runs eagerly: {failure.error}" for failure in state.compiler.failures]
    reports = [_format_report(report) for report in state.backend.reports]
    by_region = state.regions.explain() or _format_eager(plan)
    by_algorithm = state.reducer.algorithm.explain()
    return "\n".join([plan.format_table(), *reports, *by_region, *by_algorithm, *failures])


def _format_report(report: GraphReport) -> str:
    how = "launched inside its backward" if report.launches_in_backward else f"{report.num_partitions} partitions"
    lines = [f"graph {report.graph}: {report.num_buckets} buckets, {how}"]
    lines += [f"  not cut in the forward at {declined.node}: {declined.reason}" for declined in report.not_cut]
    return "\n".join([*lines, *(f"  at {declined.node}: {declined.reason}" for declined in report.declined)])


def _format_eager(plan: BucketPlan) -> list[str]:
    num_eager = sum(bucket.frame is None for bucket in plan.buckets)
    if num_eager in (0, len(plan.buckets)):  # where nothing is compiled yet, the table says all
        return []
    return [
        f"{num_eager} buckets of {len(plan.buckets)} are in no graph, since Dynamo does not compile the code that uses"
        ' them (TORCH_LOGS="graph_breaks" says why); they are launched by their hooks, as the gradients come'
    ]
