"""Warnings after a plan is sealed: communication that is not hidden, and code that is not compiled."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_compile.compile.backend import GraphReport, graphs_without_cut
from ddp_compile.errors import this_rank
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.torch_internals import GraphBreaks


def not_called(rank: int) -> str:
    """The warning that the module itself was never called for training."""
    return (
        f"{this_rank()}: the module itself has not been called for training: gradients came through one of its"
        " submodules or methods, or through module.forward. These are not compiled, and buffers are not"
        " broadcast before them; call the module: model(x)"
    )


def nothing_compiled(rank: int, breaks: GraphBreaks) -> str:
    """The warning that Dynamo has made no graph."""
    return (
        f"{this_rank()}: nothing was compiled: Dynamo made no graph of the module, so it runs"
        f' eagerly.{_reasons(breaks)} TORCH_LOGS="graph_breaks,recompiles" says more'
    )


def compiled_in_blocks(rank: int, blocks: Sequence[str], breaks: GraphBreaks) -> str:
    """The warning that Dynamo has left the code that calls blocks to Python."""
    return (
        f"{this_rank()}: the module was not compiled as a whole: Dynamo leaves the code that calls blocks to Python,"
        f" and each block is compiled by itself: {'; '.join(blocks)}.{_reasons(breaks)} To compile that code as well,"
        ' keep what breaks the graph out of the forward; TORCH_LOGS="graph_breaks" shows all breaks'
    )


def all_at_once(rank: int, plan: BucketPlan, cap_bytes: int, reports: Sequence[GraphReport]) -> str | None:
    """The warning that no bucket can be launched early; None if some can.

    Args:
        rank: This rank.
        plan: The sealed plan.
        cap_bytes: The largest capacity of a bucket.
        reports: Of the graphs made for training.
    """
    whole = graphs_without_cut(reports)
    if not whole and not (plan.num_bytes > 2 * cap_bytes and (len(plan.buckets) == 1 or not reports)):
        return None
    declined = [f"{d.node}: {d.reason}" for report in whole for d in report.declined]
    reasons = "; ".join(declined) or "one node of the graph makes them all ready"
    if not reports:
        reasons = (
            "graphs made in evaluation mode are not cut; put the model into training mode, and only the layers that"
            " must not be in it into evaluation mode"
        )
    return (
        f"{this_rank()}: {plan.num_bytes / 2**20:.1f} MiB of gradients become ready all at once, so their communication"
        f" is not hidden behind the backward: {reasons}"
    )


def _reasons(breaks: GraphBreaks) -> str:
    return "".join(f" {line[0].upper()}{line[1:]}." for line in breaks.explain())
