"""Packs gradients into buckets up to capacities."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import get_args

from ddp_compile.plan.spec import BucketPlan, BucketSpec, GradientSpec, Layout, renumbered

#: Dtypes and device, and the index of a sparse gradient, which has a bucket to itself.
Kind = tuple[str, str | None, str, int | None]


def plan_buckets(
    gradients: Iterable[GradientSpec], caps_bytes: int | Sequence[int], layout: Layout = "padded"
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
    if not caps or any(cap <= 0 for cap in caps):
        raise ValueError(f"bucket capacities {list(caps)} (bytes) must be positive and at least one must be given")
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout!r} is not known; pass one of {get_args(Layout)}")
    return BucketPlan(renumbered(pack(gradients, caps, layout, frame=None)))


def kind_of(gradient: GradientSpec) -> Kind:
    """Gradients of different kinds never share a bucket."""
    return gradient.dtype, gradient.param_dtype, gradient.device, gradient.index if gradient.is_sparse else None


def by_kind(gradients: Iterable[GradientSpec]) -> list[list[GradientSpec]]:
    """The gradients of each kind, in the order given."""
    found: dict[Kind, list[GradientSpec]] = {}
    for gradient in gradients:
        found.setdefault(kind_of(gradient), []).append(gradient)
    return list(found.values())


def pack(
    gradients: Iterable[GradientSpec],
    caps_bytes: Sequence[int],
    layout: Layout,
    frame: int | None,
    region_of: Mapping[int, int] = MappingProxyType({}),
) -> list[BucketSpec]:
    """Buckets of gradients in the order given, ordered by their last gradients.

    A bucket closes when it has reached its capacity; the last capacity holds for all further buckets. Each kind of
    gradient uses the capacities in turn, separately from the others. ``region_of`` is the region of each parameter that
    is in one, by index. Gradients of a region become ready all at once, and are consecutive here.

    Source: ``compute_bucket_assignment_by_size`` of torch 2.13, csrc/distributed/c10d/reducer.cpp.
    """
    filling_of: dict[Kind, _Filling] = {}
    place: dict[int, int] = {}
    for region, members in itertools.groupby(gradients, lambda gradient: region_of.get(gradient.index)):
        if region is None:
            runs = [[gradient] for gradient in members]
        else:  # in any order: sparse gradients first, since they wait for no bucket
            runs = sorted(by_kind(members), key=lambda run: not run[0].is_sparse)
        for run in runs:
            place |= {gradient.index: len(place) + i for i, gradient in enumerate(run)}
            filling = filling_of.get(kind := kind_of(run[0]))
            if filling is None:
                filling = filling_of[kind] = _Filling(caps_bytes[-1:] if run[0].is_sparse else caps_bytes)
            filling.add(run) if region is None else filling.add_region(run)
    closed = [bucket for filling in filling_of.values() for bucket in filling.closed()]
    closed.sort(key=lambda bucket: place[bucket[0][-1].index])
    return [BucketSpec(i, tuple(members), cap, frame, layout) for i, (members, cap) in enumerate(closed)]


class _Filling:
    """The buckets of one kind while they are filled."""

    def __init__(self, caps_bytes: Sequence[int]) -> None:
        self._caps_bytes = caps_bytes
        self._closed: list[tuple[list[GradientSpec], int]] = []
        self._open: list[GradientSpec] = []
        self._num_bytes = 0

    def add(self, gradients: Iterable[GradientSpec]) -> None:
        for gradient in gradients:
            self._open.append(gradient)
            self._num_bytes += gradient.num_bytes
            if self._num_bytes >= self._cap_bytes:
                self._close()

    def add_region(self, gradients: Sequence[GradientSpec]) -> None:
        """A region that is smaller than the capacity stays whole; otherwise it shares no bucket with others."""
        num_bytes = sum(gradient.num_bytes for gradient in gradients)
        if num_bytes >= self._cap_bytes:
            self._close()  # earlier gradients must not wait for the region
        fits = num_bytes < self._cap_bytes  # the next capacity may be a larger one
        if fits:
            self._open += gradients
            self._num_bytes += num_bytes
            if self._num_bytes >= self._cap_bytes:
                self._close()
        else:
            self.add(gradients)
            self._close()

    def closed(self) -> list[tuple[list[GradientSpec], int]]:
        """All buckets, each with the capacity that it was filled to."""
        self._close()
        return self._closed

    @property
    def _cap_bytes(self) -> int:
        """Capacity of the open bucket, or of the next one if none is open."""
        return self._caps_bytes[min(len(self._closed), len(self._caps_bytes) - 1)]

    def _close(self) -> None:
        if self._open:
            self._closed.append((self._open, self._cap_bytes))
            self._open, self._num_bytes = [], 0
