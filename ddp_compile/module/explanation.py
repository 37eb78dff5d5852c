"""``model.explain()``, and the warnings after the plan is sealed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup

from ddp_compile.compile.graph_report import GraphPart, GraphReport
from ddp_compile.config import ReplicateConfig, caps_from_mib
from ddp_compile.errors import number_of, this_rank
from ddp_compile.passes.pipeline import Declined
from ddp_compile.plan.spec import BucketPlan, BucketSpec
from ddp_compile.report.explanation import Break, BucketLaunch, Explanation, GraphExplanation, Partition, Refusal
from ddp_compile.torch_internals import GraphBreaks, SourceLine

if TYPE_CHECKING:
    from ddp_compile.module.replicate_state import ReplicateState

#: Why a bucket that a compiled backward computes is launched by its hooks.
TOO_EARLY = "another gradient came after it had been launched, or hooks see its gradients, so its hooks launch it"


def explain(
    state: ReplicateState, plan: BucketPlan, of_hooks: Mapping[int, str] | None = None, unused: Set[int] = frozenset()
) -> Explanation:
    """See `Explanation`; ``plan`` may be the plan so far.

    ``of_hooks`` is as from `buckets_of_hooks`, which is called if it is None. ``unused`` are parameters without a
    gradient, beside those of which the reducer knows that no rank uses them.
    """
    unused = unused | state.reducer.used_by_nobody
    of_hooks = buckets_of_hooks(state) if of_hooks is None else of_hooks
    return Explanation(
        model=state.model,
        world_size=state.process_group.size(),
        algorithm=state.reducer.algorithm.name,
        settings=(
            *_settings(state.config, state.device.type, state.process_group.size()),
            *state.compile_settings.chosen,
        ),
        plan=plan,
        launches=tuple(BucketLaunch(each.index, *_launch(state, each, of_hooks, unused)) for each in plan.buckets),
        graphs=tuple(_explain_graph(report, plan) for report in state.backend.reports),
        regions=tuple(state.regions.explain(compiled_only=bool(state.breaks))),
        in_no_graph=_in_no_graph(state, plan, unused),
        breaks=tuple(_breaks(state.breaks)),
        sharding=tuple(state.reducer.algorithm.sharding.explain()),
        averaging=tuple(state.reducer.normalizer.explain()),
    )


def buckets_of_hooks(state: ReplicateState) -> dict[int, str]:
    """The buckets that compiled backwards must leave to their hooks, and why."""
    algorithm = state.reducer.algorithm
    if not algorithm.traits.replayable:
        return dict.fromkeys(
            range(len(state.plan.buckets)), f"the {algorithm.name} must not be called twice for a bucket"
        )
    return {index: TOO_EARLY for index, bucket in enumerate(state.reducer.buckets) if bucket.was_launched_too_early}


def _launch(
    state: ReplicateState, bucket: BucketSpec, of_hooks: Mapping[int, str], unused: Set[int]
) -> tuple[bool, str]:
    """Whether a bucket is launched early, and where or why not."""
    indices = {gradient.index for gradient in bucket.gradients}
    if reason := _reason_not_to(state, indices, unused):
        return False, reason
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


def _reason_not_to(state: ReplicateState, indices: Set[int], unused: Set[int]) -> str:
    """Why a bucket is not launched early, whatever its graph is; empty if it may be."""
    if state.process_group.size() == 1 and not state.reducer.algorithm.traits.beyond_group:
        return "there is one rank, so nothing is sent"
    if not state.backend.reports and not state.regions.num_training_graphs:
        return "nothing has been compiled for training"
    return "its parameters got no gradient" if indices <= unused else ""


def _declined(report: GraphReport, indices: set[int]) -> str:
    """Why passes left a bucket to its hooks; empty if they did not."""
    numbers = [bucket.index for bucket in report.buckets if not indices.isdisjoint(g.index for g in bucket.gradients)]
    of_it = [declined for declined in report.declined if declined.bucket in numbers]
    return "; ".join(f"it {declined.reason.removeprefix(f'bucket {declined.bucket} ')}" for declined in of_it)


def _gets_gradients(report: GraphReport, indices: set[int]) -> bool:
    return any(not indices.isdisjoint(g.index for g in bucket.gradients) for bucket in report.buckets)


def _explain_graph(report: GraphReport, plan: BucketPlan) -> GraphExplanation:
    def refusals(declined: Sequence[Declined]) -> tuple[Refusal, ...]:
        return tuple(Refusal(d.node, d.reason, bucket_of(d.bucket), *place(d.node, d.line)) for d in declined)

    def place(node: str | None, line: SourceLine | None = None) -> tuple[str | None, SourceLine | None]:
        module, found = report.places.get(node, (None, None))
        return module, line or found

    def bucket_of(index: int | None) -> int | None:
        """The number in the plan of a bucket that had another one when the graph was compiled."""
        found = [bucket for bucket in report.buckets if bucket.index == index]
        return plan.bucket_of_parameter[found[0].gradients[0].index] if found else None

    def buckets_of(part: GraphPart) -> tuple[int, ...]:
        return tuple(sorted({plan.bucket_of_parameter[index] for index in part.reads}))

    return GraphExplanation(
        number=report.graph,
        num_buckets=len(report.buckets),
        partitions=tuple(Partition(buckets_of(p), p.first_node, *place(p.first_node)) for p in report.parts),
        launches_in_backward=report.launches_in_backward,
        not_cut=refusals(report.not_cut),
        refusals=refusals(report.declined),
    )


def _breaks(breaks: GraphBreaks) -> list[Break]:
    first = breaks.first
    return [Break("the first graph break", first.reason, first.place)] if first is not None else []


def _in_no_graph(state: ReplicateState, plan: BucketPlan, unused: Set[int]) -> tuple[int, ...]:
    eager = [b for b in plan.buckets if b.frame is None and not {g.index for g in b.gradients} <= unused]
    # If nothing is compiled yet, the table says everything.
    if len(eager) == len(plan.buckets) or (state.regions and not state.breaks):
        return ()
    region_of = state.builder.region_of
    return tuple(bucket.index for bucket in eager if not any(g.index in region_of for g in bucket.gradients))


def _settings(config: ReplicateConfig, device_type: str, world_size: int) -> list[str]:
    """The settings that differ from their defaults, as arguments."""
    default = ReplicateConfig(caps_bytes=caps_from_mib(None, 1.0, device_type, world_size))
    chosen = {field.name: getattr(config, field.name) for field in fields(config)}
    return [_argument(name, value) for name, value in chosen.items() if value != getattr(default, name)]


def _argument(name: str, value: Any) -> str:
    if name == "caps_bytes":
        return f"bucket_cap_mb=[{', '.join(f'{cap / 2**20:g}' for cap in value)}]"
    if name == "delayed":
        return f"delay_all_reduce_named_params of {number_of(len(value.named), 'parameter')}"
    if name == "regions" and not isinstance(value, str):
        return f"regions=[{', '.join(cls.__name__ for cls in value)}]"
    return f"{name}={sorted(value) if name == 'parameters_to_ignore' else value!r}"


def without_overlap(state: ReplicateState, plan: BucketPlan, was_compiled: bool) -> str | None:
    """A warning after the plan has been sealed: why no bucket is launched early, or not as many as could be.

    ``was_compiled`` tells whether a forward with gradients ran compiled code.
    """
    # A reentrant checkpoint calls blocks without gradients first.
    blocks_have_graphs = state.regions.num_graphs and (state.regions.num_training_graphs or not state.backend.reports)
    if not was_compiled:
        return None  # nothing could be, or the caller of `prepare_for_backward_of` decides what is
    if not state.num_graphs:
        return (
            f"{this_rank()}: nothing was compiled: Dynamo made no graph of the module, so it runs"
            f' eagerly.{_reasons(state.breaks)} TORCH_LOGS="graph_breaks,recompiles" says more'
        )
    if state.breaks and blocks_have_graphs:
        blocks = "; ".join(map(str, state.regions.explain(compiled_only=True)))
        return (
            f"{this_rank()}: the module was not compiled as a whole: Dynamo leaves the code that calls blocks to"
            f" Python, and each block is compiled by itself: {blocks}.{_reasons(state.breaks)} To compile that code as"
            ' well, keep what breaks the graph out of the forward; TORCH_LOGS="graph_breaks" shows all breaks'
        )
    # Each region's backward brings its own gradients, however many regions there are.
    if state.config.split != "none" and (state.breaks or not state.regions) and _needs_overlap(state.process_group):
        return _all_at_once(plan, state.config.caps_bytes[-1], state.backend.reports)
    return None


def _needs_overlap(process_group: ProcessGroup) -> bool:
    return process_group.size() > 1


def _all_at_once(plan: BucketPlan, cap_bytes: int, reports: Sequence[GraphReport]) -> str | None:
    """A warning that no bucket can be launched early; None if some can."""
    whole = [
        report
        for report in reports
        if len(report.buckets) > 1
        and len(report.parts) == 1
        and not (report.launches_in_backward and len(report.declined) < len(report.buckets))
    ]
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
    return "".join(f" {str(each)[0].upper()}{str(each)[1:]}." for each in _breaks(breaks))
