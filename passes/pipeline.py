"""Runs passes in order, and shows an observer the graph between them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torch import fx

from ddp_compile.plan.spec import BucketSpec
from ddp_compile.torch_internals import SourceLine

log = logging.getLogger(__name__)


class Declined(NamedTuple):
    """Something that a pass should have done but did not do."""

    node: str  #: name of the node that it concerns
    reason: str  #: why not, and what happens instead
    bucket: int | None = None  #: index of the bucket that it concerns
    line: SourceLine | None = None  #: of the user, if the graph is not one of Dynamo's, whose nodes are looked up later


class PassResult(NamedTuple):
    """The result of a pass."""

    gm: fx.GraphModule  #: to go on with; may be the one that was given, changed in place
    num_changed: int  #: nodes changed, or partitions made; 0 if the graph is unchanged
    declined: tuple[Declined, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PassContext:
    """What passes over Dynamo graphs know beside the graph."""

    #: Index of the reduced parameter that a placeholder or get_attr node stands for, by node name.
    parameter_of: Mapping[str, int]
    buckets: tuple[BucketSpec, ...]  #: with gradients from this graph, in launch order
    graph_name: str  #: for logs
    every_cut_or_none: bool = False  #: leave the graph whole unless it can be cut for every bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class AotContext:
    """What passes over AOTAutograd's forward and backward graphs know beside the graph."""

    #: Index of the reduced parameter at each position among the inputs of the Dynamo graph.
    parameter_of_input: Mapping[int, int]
    buckets: tuple[BucketSpec, ...]  #: with gradients from the Dynamo graph, in launch order
    reducer_id: int  #: number by which the operators find the reducer
    graph_name: str  #: for logs
    reads: tuple[int, ...] = ()  #: indices of all reduced parameters that the Dynamo graph reads
    #: Of the parameters whose gradients may move to the flat buffer inside the backward, by index.
    strides: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


ContextT = TypeVar("ContextT", PassContext, AotContext)

Pass = Callable[[fx.GraphModule, PassContext], PassResult]

#: Called with the graph, which it must not change: "graph before", then "graph after PASS" if a pass changed it.
Observer = Callable[[str, fx.GraphModule], None]


def run_pipeline(
    gm: fx.GraphModule,
    ctx: ContextT,
    passes: Sequence[Callable[[fx.GraphModule, ContextT], PassResult]],
    observe: Observer = lambda heading, gm: None,
) -> PassResult:
    """Run passes in order. Lint and recompile after each pass that changed something.

    Returns the last graph, the sum of all ``num_changed``, and everything that was declined.
    """
    observe("graph before", gm)
    declined: list[Declined] = []
    total_changed = 0
    for run_pass in passes:
        name = run_pass.__name__.removesuffix("_pass")
        gm, num_changed, refused = run_pass(gm, ctx)
        if num_changed:
            gm.graph.lint()
            gm.recompile()
        total_changed += num_changed
        declined.extend(refused)
        log.debug("%s: %s changed %d", ctx.graph_name, name, num_changed)
        for each in refused:
            log.info("%s: %s declined at %s: %s", ctx.graph_name, name, each.node, each.reason)
        if num_changed:
            observe(f"graph after {name}", gm)
    return PassResult(gm, total_changed, tuple(declined))
