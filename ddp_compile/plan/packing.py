"""Packs gradients into buckets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import get_args

from ddp_compile.plan.spec import BucketPlan, BucketSpec, GradientSpec, Layout, renumbered

#: Dtype and device: those of all gradients of a bucket.
_Kind = tuple[str, str]


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

    Source: the packing rule (a bucket closes once it has reached its capacity; each dtype and device uses the
    capacities in turn, separately from others) is ``compute_bucket_assignment_by_size`` of torch 2.13,
    csrc/distributed/c10d/reducer.cpp.
    """
    caps = (caps_bytes,) if isinstance(caps_bytes, int) else tuple(caps_bytes)
    check_caps(caps, layout)
    return BucketPlan(renumbered(pack(gradients, caps, layout, frame=None)))


def check_caps(caps: Sequence[int], layout: Layout) -> None:
    if not caps or any(cap <= 0 for cap in caps):
        raise ValueError(f"bucket capacities {list(caps)} (bytes) must be positive and at least one must be given")
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout!r} is not known; pass one of {get_args(Layout)}")


def pack(
    gradients: Iterable[GradientSpec],
    caps: Sequence[int],
    layout: Layout,
    frame: int | None,
    region_of: Mapping[int, int] = MappingProxyType({}),
) -> list[BucketSpec]:
    """Buckets of gradients in the order given.

    Args:
        region_of: The region of each parameter that is in one, by index. Gradients of a region become ready all at
            once, and are consecutive here. If a region is smaller than the capacity, a bucket takes all of it.
            Otherwise no bucket mixes its gradients with others.
    """
    packing = _Packing(caps)
    for region, members in itertools.groupby(gradients, key=lambda gradient: region_of.get(gradient.index)):
        if region is None:
            for gradient in members:
                packing.add(gradient)
        else:
            packing.add_region(list(members))
    return [BucketSpec(i, tuple(b.gradients), b.cap_bytes, frame, layout) for i, b in enumerate(packing.ordered())]


@dataclass(slots=True)
class _OpenBucket:
    """A bucket that is being packed; ``last`` is the position of its last gradient in the order given."""

    cap_bytes: int
    gradients: list[GradientSpec] = field(default_factory=list)
    num_bytes: int = 0
    last: int = -1


class _Packing:
    """Buckets being packed. Each dtype and device uses the capacities in turn, separately from others."""

    def __init__(self, caps: Sequence[int]) -> None:
        self._caps = caps
        self._closed: list[_OpenBucket] = []
        self._open: dict[_Kind, _OpenBucket] = {}
        self._num_opened: dict[_Kind, int] = {}
        self._num_added = 0

    def add(self, gradient: GradientSpec) -> None:
        """Add a gradient to the open bucket of its kind, which closes when it has reached its capacity."""
        if gradient.is_sparse:
            self._closed.append(_OpenBucket(self._caps[-1], [gradient], last=self._num_added))
            self._num_added += 1
            return
        self._append(gradient)
        self._close_if_full(_kind(gradient))

    def add_region(self, members: Sequence[GradientSpec]) -> None:
        """Add gradients that become ready all at once."""
        by_kind: dict[_Kind, list[GradientSpec]] = {}
        for gradient in members:
            if gradient.is_sparse:
                self.add(gradient)
            else:
                by_kind.setdefault(_kind(gradient), []).append(gradient)
        for kind, gradients in by_kind.items():
            num_bytes = sum(gradient.num_bytes for gradient in gradients)
            if num_bytes >= self._cap_of(kind):
                self._close(kind)  # earlier gradients must not wait for the region
            is_small = num_bytes < self._cap_of(kind)
            for gradient in gradients:
                if is_small:
                    self._append(gradient)
                else:
                    self.add(gradient)
            if is_small:
                self._close_if_full(kind)
            else:
                self._close(kind)

    def ordered(self) -> list[_OpenBucket]:
        """All buckets, in the order in which their last gradients are ready."""
        return sorted([*self._closed, *self._open.values()], key=lambda bucket: bucket.last)

    def _append(self, gradient: GradientSpec) -> None:
        kind = _kind(gradient)
        if kind not in self._open:
            cap_bytes = self._cap_of(kind)
            self._num_opened[kind] = self._num_opened.get(kind, 0) + 1
            self._open[kind] = _OpenBucket(cap_bytes)
        bucket = self._open[kind]
        bucket.gradients.append(gradient)
        bucket.num_bytes += gradient.num_bytes
        bucket.last = self._num_added
        self._num_added += 1

    def _cap_of(self, kind: _Kind) -> int:
        """Capacity of the open bucket, or of the next one if none is open."""
        if kind in self._open:
            return self._open[kind].cap_bytes
        return self._caps[min(self._num_opened.get(kind, 0), len(self._caps) - 1)]

    def _close_if_full(self, kind: _Kind) -> None:
        if self._open[kind].num_bytes >= self._open[kind].cap_bytes:
            self._close(kind)

    def _close(self, kind: _Kind) -> None:
        if kind in self._open:
            self._closed.append(self._open.pop(kind))


def _kind(gradient: GradientSpec) -> _Kind:
    return gradient.dtype, gradient.device
