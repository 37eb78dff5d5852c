"""Builds the plan of one module: frame by frame, then sealed, then with its tail packed again once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from ddp_compile.plan.packing import pack
from ddp_compile.plan.spec import BucketPlan, BucketSpec, GradientSpec, Layout, renumbered


class _Place(NamedTuple):
    """The place of a compiled frame's bucket."""

    frame: int  # ordinal of the frame
    position: int  # among the frame's buckets
    from_end: int  # number of buckets from this one to the last one of the first frame


class PlanBuilder:
    """Builds the plan of one module frame by frame, in the order in which Dynamo compiles the frames.

    Args:
        gradients: Every reduced parameter, in registration order; ``gradients[i].index == i``.
        caps_bytes: Bucket capacities in bytes, see `plan_buckets`. Each frame starts with the first one.
        layout: See `BucketSpec`.
        region_of: The region of each parameter that is in one, by index; see `pack`.
    """

    def __init__(
        self,
        gradients: Sequence[GradientSpec],
        caps_bytes: Sequence[int],
        layout: Layout = "padded",
        region_of: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        assert [gradient.index for gradient in gradients] == list(range(len(gradients)))
        self.gradients = tuple(gradients)
        self.caps_bytes = tuple(caps_bytes)
        self.layout = layout
        self.region_of = region_of
        self.sealed: BucketPlan | None = None
        self.given: BucketPlan | None = None  #: a saved one, which is proposed instead of packing
        self._frames: list[list[BucketSpec]] = []
        self._num_buckets = 0  # of all frames
        self._place_of: dict[int, _Place] = {}

    def add_frame(self, ready_order: Sequence[int]) -> list[BucketSpec]:
        """Add one frame; return every bucket with a parameter of the frame, in launch order.

        Until the plan is sealed, this packs the parameters that were in no earlier frame. Afterwards the sealed plan
        decides.
        """
        if (fixed := self.sealed or self.given) is not None:
            indices = {fixed.bucket_of_parameter[i] for i in ready_order}
            return [fixed.buckets[index] for index in sorted(indices)]
        fresh = [self.gradients[i] for i in ready_order if i not in self._place_of]
        if fresh:  # empty if a frame is compiled again
            self._pack_frame(fresh)
        # By the index that `propose` would now give a bucket: every new frame goes before the earlier ones. There is no
        # loop over all buckets, since a model may have a hundred frames with many small parameters.
        places = map(self._place_of.__getitem__, ready_order)
        found = {self._num_buckets - place.from_end: place for place in places}
        return [replace(self._frames[place.frame][place.position], index=i) for i, place in sorted(found.items())]

    def _pack_frame(self, gradients: Sequence[GradientSpec]) -> None:
        frame = len(self._frames)
        buckets = pack(gradients, self.caps_bytes, self.layout, frame=frame)
        self._frames.append(buckets)
        self._num_buckets += len(buckets)
        for position, bucket in enumerate(buckets):
            place = _Place(frame, position, self._num_buckets - position)
            self._place_of.update((gradient.index, place) for gradient in bucket.gradients)

    def propose(self) -> BucketPlan:
        """The plan as this rank sees it.

        The backward runs through the frames from the last to the first, so the last frame's buckets are launched first.
        Parameters that are in no frame are the eager tail, in reverse registration order, after all frames. If it
        contains regions, which run between the frames, all buckets are in reverse registration order.
        """
        if self.given is not None:
            return self.given
        tail = [gradient.index for gradient in reversed(self.gradients) if gradient.index not in self._place_of]
        parts = [*reversed(self._frames), *([bucket] for bucket in self._pack_tail(tail))]
        if self._frames and any(index in self.region_of for index in tail):
            parts.sort(key=lambda part: min(g.index for bucket in part for g in bucket.gradients), reverse=True)
        return BucketPlan(renumbered(bucket for part in parts for bucket in part))

    def reorder_tail(self, arrival_order: Sequence[int]) -> BucketPlan:
        """The sealed plan's next generation, with the eager tail packed in the order in which its gradients arrived.

        It has the same buckets for compiled frames, and all buckets in the order of their last gradients. Parameters
        without a gradient come last.
        """
        assert self.sealed is not None
        # A repeated key keeps its first place.
        order = dict.fromkeys([*arrival_order, *self.sealed.bucket_of_parameter])
        place = {index: i for i, index in enumerate(order)}
        compiled = [bucket for bucket in self.sealed.buckets if bucket.frame is not None]
        in_tail = {g.index for bucket in self.sealed.buckets if bucket.frame is None for g in bucket.gradients}
        buckets = [*compiled, *self._pack_tail([index for index in order if index in in_tail])]
        buckets.sort(key=lambda bucket: max(place[gradient.index] for gradient in bucket.gradients))
        return BucketPlan(renumbered(buckets), self.sealed.generation + 1)

    def _pack_tail(self, order: Sequence[int]) -> list[BucketSpec]:
        """Buckets of these parameters. Those of a region stay together, at the place of the first one."""
        begins: dict[int, int] = {}
        for place, index in enumerate(order):
            if index in self.region_of:
                begins.setdefault(self.region_of[index], place)
        # Sorting is stable: parameters of a region keep their order.
        places = {index: begins.get(self.region_of.get(index, -1), place) for place, index in enumerate(order)}
        tail = [self.gradients[index] for index in sorted(order, key=places.__getitem__)]
        return pack(tail, self.caps_bytes, self.layout, frame=None, region_of=self.region_of)

    def lay_out_as(self, layout: Layout, owners: Mapping[int, int]) -> None:
        """Give every bucket, those of a sealed plan too, another layout, and its gradients other owners by index."""
        self.layout = layout
        self.gradients = tuple(replace(gradient, owner=owners.get(gradient.index)) for gradient in self.gradients)
        self._frames = [self._laid_out(frame) for frame in self._frames]
        if self.given is not None:
            self.given = replace(self.given, buckets=tuple(self._laid_out(self.given.buckets)))
        if self.sealed is not None:
            self.sealed = replace(self.sealed, buckets=tuple(self._laid_out(self.sealed.buckets)))

    def _laid_out(self, buckets: Sequence[BucketSpec]) -> list[BucketSpec]:
        return [
            replace(bucket, layout=self.layout, gradients=tuple(self.gradients[g.index] for g in bucket.gradients))
            for bucket in buckets
        ]

    def use(self, plan: BucketPlan) -> None:
        """Propose a saved plan of the same model, with this module's layout, instead of packing."""
        self.given = BucketPlan(tuple(self._laid_out(plan.buckets)))

    def seal(self, plan: BucketPlan) -> None:
        """Fix the plan that all ranks agreed on; frames that are compiled later are cut at its boundaries."""
        assert set(plan.bucket_of_parameter) == {gradient.index for gradient in self.gradients}
        self.sealed = plan
