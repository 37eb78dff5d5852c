"""Packs gradients into buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, get_args

from ddp_compile.plan.costs import Costs
from ddp_compile.plan.planner import Capacities, LeastTime, Planner, atoms_of
from ddp_compile.plan.schedule import loads_of, predict
from ddp_compile.plan.spec import BucketPlan, BucketSpec, GradientSpec, Layout, renumbered


def plan_buckets(
    gradients: Iterable[GradientSpec],
    caps_bytes: int | Sequence[int],
    layout: Layout = "padded",
) -> BucketPlan:
    """Pack gradients into buckets in the order given, which should be the order in which they become ready.

    For users; training packs by `PlanBuilder`, which calls `pack`.

    Args:
        gradients: The gradients in gradient-ready order.
        caps_bytes: One capacity in bytes, or one for each bucket. The last one holds for all further buckets.
        layout: See `BucketSpec`.

    Returns:
        A plan in which every bucket has one dtype and one device, a sparse gradient has its own bucket, and buckets are
        ordered by when their last gradient is ready.

    Raises:
        ValueError: A capacity is not positive, or the layout is not known.
    """
    caps = (caps_bytes,) if isinstance(caps_bytes, int) else tuple(caps_bytes)
    return BucketPlan(renumbered(pack(gradients, caps, layout, frame=None)))


def check_layout(layout: Layout) -> None:
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout!r} is not known; pass one of {get_args(Layout)}")


def pack(
    gradients: Iterable[GradientSpec],
    planner: Planner | Sequence[int],
    layout: Layout,
    frame: int | None,
    region_of: Mapping[int, int] = MappingProxyType({}),
) -> list[BucketSpec]:
    """Buckets of gradients in the order given.

    Args:
        planner: A planner, or the capacities in bytes of `Capacities`.
        region_of: The region of each parameter that is in one, by index. Gradients of a region become ready all at
            once, and are consecutive here.
    """
    check_layout(layout)
    chosen = planner if isinstance(planner, Planner) else Capacities(planner)
    return [
        BucketSpec(i, tuple(atom.gradient for atom in group.atoms), group.cap_bytes, frame, layout)
        for i, group in enumerate(chosen.group(atoms_of(gradients, region_of)))
    ]


class Replanned(NamedTuple):
    """A plan that follows another one of the same model."""

    plan: BucketPlan
    present_s: float  #: predicted step of the plan before, in seconds
    expected_s: float  #: predicted step of this plan, in seconds


def replan(plan: BucketPlan, costs: Costs, least_gain: float, largest_bytes: int | None = None) -> Replanned | None:
    """The plan that ends the step as early as possible by these costs.

    Args:
        plan: The present one.
        costs: Of the same model.
        least_gain: The part of the step, for example 0.02, by which the predicted step has to be shorter.
        largest_bytes: See `LeastTime`.

    Returns:
        The plan's next generation; None if it does not gain as much.
    """
    ready_order = sorted((g for bucket in plan.buckets for g in bucket.gradients), key=lambda g: costs.ready_s[g.index])
    frame_of = {gradient.index: bucket.frame for bucket in plan.buckets for gradient in bucket.gradients}
    packed = pack(ready_order, LeastTime(costs, largest_bytes), plan.buckets[0].layout, frame=None)
    buckets = [replace(bucket, frame=frame_of[bucket.gradients[-1].index]) for bucket in packed]
    following = BucketPlan(renumbered(buckets), plan.generation + 1)
    present_s, expected_s = (predict(loads_of(each, costs), costs).step_s for each in (plan, following))
    if expected_s > present_s * (1 - least_gain):
        return None
    return Replanned(following, present_s, expected_s)
