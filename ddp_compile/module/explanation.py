"""``model.explain()``, and the warnings after the plan is sealed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ddp_compile.compile.backend import GraphReport, graphs_without_cut
from ddp_compile.errors import number_of, this_rank
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.torch_internals import GraphBreaks

if TYPE_CHECKING:
    from ddp_compile.module.replicate_state import ReplicateState


def explain(state: ReplicateState, plan: BucketPlan) -> str:
    """The bucket table, how each graph was cut or shared, which cuts were declined, and what could not be compiled."""
    failures = [f"{failure.graph} runs eagerly: {failure.error}" for failure in state.compiler.failures]
    reports = [_format_report(report) for report in state.backend.reports]
    by_region = state.regions.explain(compiled_only=bool(state.breaks))
    eager = _format_eager(plan, state.builder.region_of) if state.breaks or not state.regions else []
    by_algorithm = state.reducer.algorithm.sharding.explain()
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
    if len(eager) == len(plan.buckets) or not in_no_graph:  # if nothing is compiled yet, the table says everything
        return []
    are, them, they = ("is", "it", "it is") if len(in_no_graph) == 1 else ("are", "them", "they are")
    return [
        f"{number_of(len(in_no_graph), 'bucket')} of {len(plan.buckets)} {are} in no graph, since Dynamo does not"
        f' compile the code that uses {them} (TORCH_LOGS="graph_breaks" says why); {they} launched by hooks, as the'
        " gradients come"
    ]


def not_called() -> str:
    return (
        f"{this_rank()}: the module itself has not been called for training: gradients came through one of its"
        " submodules or methods, or through module.forward. These are not compiled, and no buffers are broadcast"
        " before them; call the module: model(x)"
    )


def nothing_compiled(breaks: GraphBreaks) -> str:
    return (
        f"{this_rank()}: nothing was compiled: Dynamo made no graph of the module, so it runs"
        f' eagerly.{_reasons(breaks)} TORCH_LOGS="graph_breaks,recompiles" says more'
    )


def compiled_in_blocks(blocks: Sequence[str], breaks: GraphBreaks) -> str:
    return (
        f"{this_rank()}: the module was not compiled as a whole: Dynamo leaves the code that calls blocks to Python,"
        f" and each block is compiled by itself: {'; '.join(blocks)}.{_reasons(breaks)} To compile that code as well,"
        ' keep what breaks the graph out of the forward; TORCH_LOGS="graph_breaks" shows all breaks'
    )


def all_at_once(plan: BucketPlan, cap_bytes: int, reports: Sequence[GraphReport]) -> str | None:
    """A warning that no bucket can be launched early; None if some can."""
    whole = graphs_without_cut(reports)
    if not whole and not (plan.num_bytes > 2 * cap_bytes and (len(plan.buckets) == 1 or not reports)):
        return None
    declined = [f"{d.node}: {d.reason}" for report in whole for d in report.declined]
    reasons = "; ".join(declined) or "one node of the graph makes them all ready"
    if not reports:
        reasons = (
            "graphs made in evaluation mode are not cut; put the model into training mode, and only layers that need"
            " evaluation mode into that"
        )
    return (
        f"{this_rank()}: {plan.num_bytes / 2**20:.1f} MiB of gradients become ready all at once, so their communication"
        f" is not hidden behind the backward: {reasons}"
    )


def _reasons(breaks: GraphBreaks) -> str:
    return "".join(f" {line[0].upper()}{line[1:]}." for line in breaks.explain())
