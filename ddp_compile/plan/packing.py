"""Packs gradients into buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import get_args

from ddp_compile.plan.planner import Capacities, Planner, atoms_of
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
