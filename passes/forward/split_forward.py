"""Cuts a forward graph at bucket boundaries, so that the backward makes buckets ready one by one."""

import itertools
import logging
from typing import NamedTuple

from torch import fx
from torch._ops import HigherOrderOperator

from ddp_compile.passes.analysis.cut_constraints import HeldCuts, find_held_cuts
from ddp_compile.passes.analysis.grad_ready_order import grad_ready_order
from ddp_compile.passes.forward.partition_graph import partition_graph
from ddp_compile.passes.pipeline import Declined, PassContext, PassResult
from ddp_compile.plan.spec import BucketSpec

log = logging.getLogger(__name__)


class _Boundary(NamedTuple):
    """A bucket whose gradients are ready after the backward of all nodes from ``position`` on."""

    bucket: BucketSpec
    position: int


def split_forward_pass(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    """Partition the graph so that each bucket's gradients are ready after one partition's backward.

    The engine runs a compiled backward as one piece, so gradients reach the reducer when the piece ends. Two buckets in
    one partition are launched together. With one partition for each bucket, each bucket is launched while the next
    partition computes.

    before::

        h = linear(x, w1)          # bucket 1
        y = linear(h, w2)          # bucket 0
        return (y,)

    after::

        h = partition_0(x, w1)
        y = partition_1(h, w2)
        return (y,)

    Source: modeled on DDPOptimizer of torch 2.13 (_dynamo/backends/distributed.py), with three differences: the
    boundaries are those of the reducer's plan, a held cut moves to the nearest earlier place that is not held, and
    partitions keep the order of the nodes.
    """
    boundaries = _find_boundaries(gm, ctx)
    if len(boundaries) < 2:
        return PassResult(gm, 0)
    cuts, declined = _place_cuts(gm, ctx, boundaries)
    if not cuts or (ctx.every_cut_or_none and len(cuts) < _num_wanted(gm, boundaries)):
        return PassResult(gm, 0, tuple(declined))
    return PassResult(partition_graph(gm, sorted(cuts)), len(cuts) + 1, tuple(declined))


def _find_boundaries(gm: fx.GraphModule, ctx: PassContext) -> list[_Boundary]:
    """One boundary for each bucket with gradients from the graph, in the order in which the backward reaches them."""
    # Reads under no_grad count: the gradient waits for the backward of each partition that gets the parameter.
    reads: dict[int, int] = {}
    for position, node in enumerate(gm.graph.nodes):
        for argument in node.all_input_nodes:
            if argument.name in ctx.parameter_of:
                reads.setdefault(ctx.parameter_of[argument.name], position)
    position_of = {parameter: reads[parameter] for parameter in grad_ready_order(gm, ctx.parameter_of)}
    boundaries = []
    for bucket in ctx.buckets:
        positions = [position_of[g.index] for g in bucket.gradients if g.index in position_of]
        if positions:
            boundaries.append(_Boundary(bucket, min(positions)))
    return sorted(boundaries, key=lambda boundary: -boundary.position)


def _num_wanted(gm: fx.GraphModule, boundaries: list[_Boundary]) -> int:
    """The number of cuts that would launch a bucket earlier; none is between two buckets that one operator reads.

    A cut at a higher-order operator, such as a checkpoint, counts, since its backward makes the two ready one by one.
    """
    nodes = list(gm.graph.nodes)
    return sum(
        earlier.position != later.position or isinstance(nodes[earlier.position].target, HigherOrderOperator)
        for earlier, later in itertools.pairwise(boundaries)
    )


def _place_cuts(gm: fx.GraphModule, ctx: PassContext, boundaries: list[_Boundary]) -> tuple[list[int], list[Declined]]:
    nodes = list(gm.graph.nodes)
    first = next(i for i, node in enumerate(nodes) if node.op not in ("placeholder", "get_attr"))
    held = find_held_cuts(gm)
    cuts: list[int] = []
    declined: list[Declined] = []
    for (bucket, wanted), (following, floor) in itertools.pairwise(boundaries):
        at, reasons = _nearest_cut(wanted, held)
        because = "; ".join(dict.fromkeys(reasons)) or "one node computes with gradients of both"
        # At or before the next boundary, this cut makes the bucket ready no earlier than the next bucket's cut does.
        if at <= max(floor, first):
            note = f"bucket {bucket.index} is launched with bucket {following.index}: {because}"
            declined.append(Declined(nodes[wanted].name, note, bucket.index))
            continue
        if at != wanted:
            note = f"cut moved up to {nodes[at].name}: {because}"
            declined.append(Declined(nodes[wanted].name, note, bucket.index))
        cuts.append(at)
        log.debug("%s: cut before %s so that bucket %d is launched early", ctx.graph_name, nodes[at].name, bucket.index)
    return cuts, declined


def _nearest_cut(wanted: int, held: list[HeldCuts]) -> tuple[int, list[str]]:
    """The last position up to ``wanted`` that is not held, and the reasons for those that are.

    Only earlier positions work: the backward reaches them later, when all of the bucket's gradients are ready.
    """
    at, reasons = wanted, []
    while blocking := next((interval for interval in held if interval.first <= at <= interval.last), None):
        reasons.append(blocking.reason)
        at = blocking.first - 1
    return at, reasons
