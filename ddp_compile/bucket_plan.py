"""Which gradients travel together, in which order: the one plan that graph cuts and the reducer both read.

Pure data and arithmetic: nothing here talks to another rank or touches a graph.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch

Layout = Literal["padded", "ddp"]

#: Every gradient of a padded bucket starts at a multiple of this many bytes: a whole number of 128-bit loads, and of
#: cache lines, for every dtype.
PADDED_ALIGNMENT_BYTES = 128

_JSON_VERSION = 1


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """One parameter's gradient as the plan sees it.

    Args:
        index: Position among the parameters that are reduced, in registration order.
        fqn: Fully qualified name of the parameter.
        numel: Number of elements.
        dtype: Name of the dtype, for example ``"float32"``.
        device: Label of the device that is the same on every rank, for example ``"cuda"`` (see `device_labels`).
        is_sparse: The gradient is a sparse tensor, which cannot share a flat buffer.
    """

    index: int
    fqn: str
    numel: int
    dtype: str
    device: str
    is_sparse: bool = False

    @property
    def num_bytes(self) -> int:
        return self.numel * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class BucketSpec:
    """Gradients of one dtype and one device that leave in one all-reduce, in the order in which they become ready.

    Args:
        index: Position in the plan, which is the launch order.
        gradients: What the bucket holds.
        cap_bytes: The capacity it was packed to. A bucket closes when it has reached its capacity, so it can be
            larger by less than its last gradient.
        frame: Ordinal of the compiled frame that the bucket belongs to; None for the eager tail.
        layout: ``"padded"`` starts each gradient at a multiple of `PADDED_ALIGNMENT_BYTES`, ``"ddp"`` leaves no gaps.
    """

    index: int
    gradients: tuple[GradientSpec, ...]
    cap_bytes: int
    frame: int | None = None
    layout: Layout = "padded"

    @property
    def dtype(self) -> str:
        return self.gradients[0].dtype

    @property
    def device(self) -> str:
        return self.gradients[0].device

    @property
    def is_sparse(self) -> bool:
        return self.gradients[0].is_sparse

    @cached_property
    def byte_offsets(self) -> tuple[int, ...]:
        """Where each gradient starts in the flat buffer, in bytes."""
        return self._offsets_and_size[0]

    @cached_property
    def num_bytes(self) -> int:
        """Size of the flat buffer in bytes, padding included."""
        return self._offsets_and_size[1]

    @cached_property
    def _offsets_and_size(self) -> tuple[tuple[int, ...], int]:
        alignment = PADDED_ALIGNMENT_BYTES if self.layout == "padded" else 1
        offsets, end = [], 0
        for gradient in self.gradients:
            offsets.append(end)
            end += -(-gradient.num_bytes // alignment) * alignment
        return tuple(offsets), end


@dataclass(frozen=True)
class BucketPlan:
    """An ordered set of buckets that holds every reduced parameter exactly once.

    Args:
        buckets: The buckets in launch order.
        generation: Counts the plans that a module has trained with; a new one is only installed between steps.
    """

    buckets: tuple[BucketSpec, ...]
    generation: int = 0

    def __post_init__(self) -> None:
        indices = [gradient.index for bucket in self.buckets for gradient in bucket.gradients]
        assert len(indices) == len(set(indices)), "a parameter stands in two buckets"
        assert [bucket.index for bucket in self.buckets] == list(range(len(self.buckets)))

    @cached_property
    def bucket_of_parameter(self) -> dict[int, int]:
        """Bucket index for each parameter index."""
        return {gradient.index: bucket.index for bucket in self.buckets for gradient in bucket.gradients}

    @property
    def num_bytes(self) -> int:
        """Bytes that one backward sends into the all-reduces, padding included."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits that are equal on all ranks and in all processes exactly where the plans are."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan as JSON text without spaces; equal plans give equal text."""
        buckets = [
            {
                "cap_bytes": bucket.cap_bytes,
                "device": bucket.device,
                "dtype": bucket.dtype,
                "frame": bucket.frame,
                "gradients": [[g.index, g.fqn, g.numel] for g in bucket.gradients],
                "layout": bucket.layout,
                "sparse": bucket.is_sparse,
            }
            for bucket in self.buckets
        ]
        document = {"version": _JSON_VERSION, "generation": self.generation, "buckets": buckets}
        return json.dumps(document, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: The text was written by another version of the format.
        """
        document = json.loads(text)
        if document.get("version") != _JSON_VERSION:
            raise ValueError(
                f"bucket plan has JSON version {document.get('version')!r}, this version of ddp_compile reads"
                f" {_JSON_VERSION}; install the same version of ddp_compile on every rank"
            )
        buckets = tuple(_bucket_from_json(i, fields) for i, fields in enumerate(document["buckets"]))
        return cls(buckets, document["generation"])

    def format_table(self) -> str:
        """The plan as a table for people, one line a bucket in launch order."""
        header = ("bucket", "MiB", "cap MiB", "dtype", "device", "gradients", "from", "to", "frame")
        rows = [
            (
                str(bucket.index),
                f"{bucket.num_bytes / 2**20:.2f}",
                f"{bucket.cap_bytes / 2**20:.2f}",
                bucket.dtype,
                bucket.device,
                f"{len(bucket.gradients)} sparse" if bucket.is_sparse else str(len(bucket.gradients)),
                bucket.gradients[0].fqn,
                bucket.gradients[-1].fqn,
                "eager" if bucket.frame is None else str(bucket.frame),
            )
            for bucket in self.buckets
        ]
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        numeric = {0, 1, 2, 5}

        def line(row: Sequence[str]) -> str:
            cells = (
                cell.rjust(width) if column in numeric else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            return "  ".join(cells).rstrip()

        total = (
            f"{len(self.buckets)} buckets, {len(self.bucket_of_parameter)} gradients,"
            f" {self.num_bytes / 2**20:.2f} MiB, generation {self.generation}, plan {self.digest}"
        )
        return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows), total])


def _bucket_from_json(index: int, fields: dict[str, Any]) -> BucketSpec:
    gradients = tuple(
        GradientSpec(i, fqn, numel, fields["dtype"], fields["device"], fields["sparse"])
        for i, fqn, numel in fields["gradients"]
    )
    return BucketSpec(index, gradients, fields["cap_bytes"], fields["frame"], fields["layout"])


def plan_buckets(
    gradients: Iterable[GradientSpec],
    caps_bytes: int | Sequence[int],
    *,
    first_cap_bytes: int | None = None,
    layout: Layout = "padded",
    generation: int = 0,
) -> BucketPlan:
    """Pack gradients into buckets in the order given, which should be the order in which they become ready.

    Args:
        gradients: The gradients in gradient-ready order.
        caps_bytes: One capacity in bytes, or one for each bucket, the last of which holds for all further buckets.
        first_cap_bytes: Capacity of the first bucket beside a single ``caps_bytes``; no larger than that is used.
        layout: See `BucketSpec`.
        generation: See `BucketPlan`.

    Returns:
        A plan in which every bucket holds one dtype and one device, a sparse gradient stands alone, and buckets are
        ordered by when their last gradient is ready.

    Raises:
        ValueError: A capacity is not positive, or the layout is not known.

    Source: the packing rule (a bucket closes once it has reached its capacity; each dtype and device steps through the
    capacities by itself) is ``compute_bucket_assignment_by_size`` of torch 2.13, csrc/distributed/c10d/reducer.cpp.
    """
    caps = (caps_bytes,) if isinstance(caps_bytes, int) else tuple(caps_bytes)
    if first_cap_bytes is not None:
        caps = (min(first_cap_bytes, caps[0]), *caps)
    _check_caps(caps, layout)
    return BucketPlan(_renumbered(_pack(gradients, caps, layout, frame=None)), generation)


def _check_caps(caps: Sequence[int], layout: Layout) -> None:
    if not caps or any(cap <= 0 for cap in caps):
        raise ValueError(f"bucket capacities {list(caps)} (bytes) must be positive and at least one must be given")
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout!r} is not known; pass one of {get_args(Layout)}")


def _pack(
    gradients: Iterable[GradientSpec], caps: Sequence[int], layout: Layout, frame: int | None
) -> list[BucketSpec]:
    closed: list[_OpenBucket] = []
    still_open: dict[tuple[str, str], _OpenBucket] = {}
    num_opened: dict[tuple[str, str], int] = {}
    for position, gradient in enumerate(gradients):
        if gradient.is_sparse:
            closed.append(_OpenBucket(caps[-1], [gradient], last=position))
            continue
        key = (gradient.dtype, gradient.device)
        if key not in still_open:
            ordinal = num_opened.get(key, 0)
            num_opened[key] = ordinal + 1
            still_open[key] = _OpenBucket(caps[min(ordinal, len(caps) - 1)])
        bucket = still_open[key]
        bucket.gradients.append(gradient)
        bucket.num_bytes += gradient.num_bytes
        bucket.last = position
        if bucket.num_bytes >= bucket.cap_bytes:
            closed.append(still_open.pop(key))
    ordered = sorted([*closed, *still_open.values()], key=lambda bucket: bucket.last)
    return [BucketSpec(i, tuple(b.gradients), b.cap_bytes, frame, layout) for i, b in enumerate(ordered)]


@dataclass(slots=True)
class _OpenBucket:
    """A bucket that is being packed; ``last`` is the position of its latest gradient in the order given."""

    cap_bytes: int
    gradients: list[GradientSpec] = field(default_factory=list)
    num_bytes: int = 0
    last: int = -1


def _renumbered(buckets: Iterable[BucketSpec]) -> tuple[BucketSpec, ...]:
    return tuple(replace(bucket, index=i) for i, bucket in enumerate(buckets))


class PlanBuilder:
    """Collects the plan of one module frame by frame, as Dynamo traces, compiles and runs them.

    Args:
        gradients: Every reduced parameter, in registration order; ``gradients[i].index == i``.
        caps_bytes: Bucket capacities in bytes, see `plan_buckets`. Each frame starts with the first one.
        layout: See `BucketSpec`.

    Raises:
        ValueError: As `plan_buckets`.
    """

    def __init__(self, gradients: Sequence[GradientSpec], caps_bytes: Sequence[int], layout: Layout = "padded") -> None:
        _check_caps(caps_bytes, layout)
        assert [gradient.index for gradient in gradients] == list(range(len(gradients)))
        self.gradients = tuple(gradients)
        self.caps_bytes = tuple(caps_bytes)
        self.layout = layout
        self.sealed: BucketPlan | None = None
        self._frames: list[list[BucketSpec]] = []
        self._planned: set[int] = set()

    def add_frame(self, ready_order: Sequence[int]) -> list[BucketSpec]:
        """Take in one frame and say which buckets meet it.

        Args:
            ready_order: Indices of the frame's parameters in gradient-ready order.

        Returns:
            Every bucket that holds a parameter of the frame, in launch order. Until the plan is sealed, parameters that
            no earlier frame has shown are packed here; later ones stay in the bucket that the sealed plan gives them.
        """
        if self.sealed is None:
            fresh = [self.gradients[i] for i in ready_order if i not in self._planned]
            self._planned.update(gradient.index for gradient in fresh)
            # A frame compiled again brings nothing new and adds no frame, so compiling twice changes nothing.
            if fresh:
                self._frames.append(_pack(fresh, self.caps_bytes, self.layout, frame=len(self._frames)))
        members = set(ready_order)
        plan = self.sealed or self.propose()
        return [bucket for bucket in plan.buckets if any(g.index in members for g in bucket.gradients)]

    def propose(self) -> BucketPlan:
        """The plan as this rank sees it.

        The backward runs through the frames from the last to the first, so the last frame's buckets leave first. What
        no frame showed is the eager tail: reverse registration order, after all frames.
        """
        tail = [gradient for gradient in reversed(self.gradients) if gradient.index not in self._planned]
        compiled = [bucket for frame in reversed(self._frames) for bucket in frame]
        return BucketPlan(_renumbered(compiled + _pack(tail, self.caps_bytes, self.layout, frame=None)))

    def reorder_tail(self, arrival_order: Sequence[int]) -> BucketPlan:
        """The sealed plan's next generation: the eager tail packed as its gradients came, each bucket in its place.

        Args:
            arrival_order: Parameter numbers in the order of their gradients in one round.

        Returns:
            A plan with the same buckets for compiled frames, and buckets in the order of their last gradients.
            Parameters that got no gradient come last.
        """
        assert self.sealed is not None
        # A dict keeps the place of a key that it has.
        order = dict.fromkeys([*arrival_order, *self.sealed.bucket_of_parameter])
        place = {index: i for i, index in enumerate(order)}
        compiled = [bucket for bucket in self.sealed.buckets if bucket.frame is not None]
        in_tail = {g.index for bucket in self.sealed.buckets if bucket.frame is None for g in bucket.gradients}
        tail = [self.gradients[index] for index in order if index in in_tail]
        buckets = [*compiled, *_pack(tail, self.caps_bytes, self.layout, frame=None)]
        buckets.sort(key=lambda bucket: max(place[gradient.index] for gradient in bucket.gradients))
        return BucketPlan(_renumbered(buckets), self.sealed.generation + 1)

    def leave_no_gaps(self) -> None:
        """Give every bucket the layout "ddp", those of a sealed plan as well; the gradients in it stay the same."""
        self.layout = "ddp"
        self._frames = [[replace(bucket, layout="ddp") for bucket in frame] for frame in self._frames]
        if self.sealed is not None:
            gapless = tuple(replace(bucket, layout="ddp") for bucket in self.sealed.buckets)
            self.sealed = replace(self.sealed, buckets=gapless)

    def seal(self, plan: BucketPlan) -> None:
        """Fix the plan all ranks agreed on; frames compiled from now on are cut at its boundaries."""
        assert set(plan.bucket_of_parameter) == {gradient.index for gradient in self.gradients}
        self.sealed = plan


def shorten_names(names: Sequence[str]) -> str:
    """Names for a message: all of a few, or the ends of a long list."""
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ..., {names[-1]}"


def device_labels(devices: Iterable[torch.device]) -> dict[torch.device, str]:
    """A label for each device that is the same on every rank.

    Ranks hold their replica on ``cuda:0``, ``cuda:1`` and so on, but must agree on one plan. The label is the device's
    type, numbered by first appearance where one replica spans several devices of a type: ``"cuda#0"``, ``"cuda#1"``.
    """
    by_type: dict[str, list[torch.device]] = {}
    for device in devices:
        known = by_type.setdefault(device.type, [])
        if device not in known:
            known.append(device)
    return {
        device: kind if len(known) == 1 else f"{kind}#{i}"
        for kind, known in by_type.items()
        for i, device in enumerate(known)
    }
