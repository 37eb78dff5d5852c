"""What ``model.explain()`` says."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_compile.compile.backend import GraphReport
from ddp_compile.errors import number_of
from ddp_compile.module.replicate_state import ReplicateState
from ddp_compile.plan.spec import BucketPlan


def explain(state: ReplicateState, plan: BucketPlan) -> str:
    """The bucket table, how each graph was cut or shared, which cuts were declined, and what could not be compiled."""
    failures = [f"{failure.graph} runs eagerly: {failure.error}" for failure in state.compiler.failures]
    reports = [_format_report(report) for report in state.backend.reports]
    by_region = state.regions.explain(compiled_only=bool(state.breaks))
    eager = _format_eager(plan, state.builder.region_of) if state.breaks or not state.regions else []
    by_algorithm = state.reducer.algorithm.explain()
    not_compiled = [*eager, *state.breaks.explain()]
    return "\n".join([plan.format_table(), *reports, *by_region, *not_compiled, *by_algorithm, *failures])


def _format_report(report: GraphReport) -> str:
    partitions = number_of(report.num_partitions, "partition")
    how = "launched inside its backward" if report.launches_in_backward else partitions
    lines = [f"graph {report.graph}: {number_of(report.num_buckets, 'bucket')}, {how}"]
    lines += [f"  not cut in the forward at {declined.node}: {declined.reason}" for declined in report.not_cut]
    return "\n".join([*lines, *(f"  at {declined.node}: {declined.reason}" for declined in report.declined)])


def _format_eager(plan: BucketPlan, region_of: Mapping[int, int]) -> list[str]:
    eager = [bucket for bucket in plan.buckets if bucket.frame is None]
    in_no_graph = [bucket for bucket in eager if not any(g.index in region_of for g in bucket.gradients)]
    if len(eager) == len(plan.buckets) or not in_no_graph:  # if nothing is compiled yet, the table says all
        return []
    are, them, they = ("is", "it", "it is") if len(in_no_graph) == 1 else ("are", "them", "they are")
    return [
        f"{number_of(len(in_no_graph), 'bucket')} of {len(plan.buckets)} {are} in no graph, since Dynamo does not"
        f' compile the code that uses {them} (TORCH_LOGS="graph_breaks" says why); {they} launched by hooks, as the'
        " gradients come"
    ]
