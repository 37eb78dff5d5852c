"""The bucket plan: which gradients are reduced together, and in which order. Graph cuts and the reducer follow it.

Pure data and arithmetic: nothing here communicates or touches a graph.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch

from ddp_compile.errors import number_of
from ddp_compile.plan.typed_json import from_document

Layout = Literal["padded", "ddp"]

#: Every gradient of a padded bucket starts at a multiple of this many bytes: a whole number of 128-bit loads and of
#: cache lines for every dtype.
PADDED_ALIGNMENT_BYTES = 128

_JSON_VERSION = 3


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """One parameter's gradient in the plan.

    Args:
        index: Position among the parameters that are reduced, in registration order.
        fqn: Fully qualified name of the parameter.
        numel: Number of elements.
        dtype: Name of the dtype in which it is reduced, for example ``"float32"``.
        device: Type of the device, for example ``"cuda"``, which is the same on every rank.
        is_sparse: The gradient is a sparse tensor, which cannot share a flat buffer.
        owner: With a sharded optimizer, the rank that steps all of the parameter; None if each rank steps a part.
        param_dtype: Name of the parameter's dtype if it is another one, see ``reduce_dtype``.
    """

    index: int
    fqn: str
    numel: int
    dtype: str
    device: str
    is_sparse: bool = False
    owner: int | None = None
    param_dtype: str | None = None

    @property
    def num_bytes(self) -> int:
        return self.numel * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class BucketSpec:
    """Gradients of one dtype and one device that are reduced together, in the order in which they become ready.

    Args:
        index: Position in the plan, which is the launch order.
        gradients: The gradients in the bucket.
        cap_bytes: The capacity that it was packed to, or its size if it was packed to none. A bucket closes when it has
            reached its capacity, so it may exceed the capacity by less than its last gradient.
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
    def itemsize(self) -> int:
        """Bytes of an element of the flat buffer."""
        size: int = getattr(torch, self.dtype).itemsize
        return size

    @property
    def param_dtype(self) -> str | None:
        return self.gradients[0].param_dtype

    @property
    def device(self) -> str:
        return self.gradients[0].device

    @property
    def is_sparse(self) -> bool:
        return self.gradients[0].is_sparse

    @cached_property
    def byte_offsets(self) -> tuple[int, ...]:
        """Where each gradient starts in the flat buffer, in bytes."""
        return self._layout[0]

    @cached_property
    def num_bytes(self) -> int:
        """Size of the flat buffer in bytes, padding included."""
        return self._layout[1]

    @cached_property
    def bytes_of_owner(self) -> dict[int | None, tuple[int, int]]:
        """Begin and end in the flat buffer of the gradients of each owner, padding included."""
        return self._layout[2]

    @cached_property
    def _layout(self) -> tuple[tuple[int, ...], int, dict[int | None, tuple[int, int]]]:
        """Gradients without an owner come first, then those of each owner together, in the order of the ranks."""
        alignment = PADDED_ALIGNMENT_BYTES if self.layout == "padded" else 1
        offsets, end = [0] * len(self.gradients), 0
        of_owner: dict[int | None, tuple[int, int]] = {}
        owners = [-1 if gradient.owner is None else gradient.owner for gradient in self.gradients]
        for place in sorted(range(len(owners)), key=owners.__getitem__):
            gradient = self.gradients[place]
            begin, _ = of_owner.get(gradient.owner, (end, end))
            offsets[place] = end
            end += -(-gradient.num_bytes // alignment) * alignment
            of_owner[gradient.owner] = begin, end
        return tuple(offsets), end, of_owner


@dataclass(frozen=True)
class BucketPlan:
    """An ordered set of buckets that holds every reduced parameter exactly once.

    Args:
        buckets: The buckets in launch order.
        generation: Counts the plans that a module has trained with. A new one comes at the end of a backward.

    Raises:
        ValueError: A parameter is in two buckets, or the buckets are not numbered by their positions.
    """

    buckets: tuple[BucketSpec, ...]
    generation: int = 0

    def __post_init__(self) -> None:
        gradients = [gradient for bucket in self.buckets for gradient in bucket.gradients]
        counts = Counter(gradient.index for gradient in gradients)
        if twice := [index for index, count in counts.items() if count > 1]:
            names = " and ".join(repr(gradient.fqn) for gradient in gradients if gradient.index == twice[0])
            raise ValueError(f"a BucketPlan has each parameter once, but this has parameter {twice[0]} twice: {names}")
        if (numbers := [bucket.index for bucket in self.buckets]) != list(range(len(self.buckets))):
            raise ValueError(f"buckets of a BucketPlan are numbered 0, 1, 2, ... in launch order, not {numbers}")

    @cached_property
    def bucket_of_parameter(self) -> dict[int, int]:
        """Bucket index for each parameter index."""
        return {gradient.index: bucket.index for bucket in self.buckets for gradient in bucket.gradients}

    @property
    def num_bytes(self) -> int:
        """Bytes that one backward all-reduces, padding included."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits that are equal in all processes if and only if the plans are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan as JSON text without spaces; equal plans give equal text."""
        buckets = [
            {
                "cap_bytes": bucket.cap_bytes,
                "device": bucket.device,
                "dtype": bucket.dtype,
                "frame": bucket.frame,
                "gradients": [[g.index, g.fqn, g.numel, g.owner] for g in bucket.gradients],
                "layout": bucket.layout,
                "param_dtype": bucket.param_dtype,
                "sparse": bucket.is_sparse,
            }
            for bucket in self.buckets
        ]
        document = {"version": _JSON_VERSION, "generation": self.generation, "buckets": buckets}
        return json.dumps(document, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: The text is malformed, or of another version of the format. The error says what is wrong.
        """
        try:
            document = json.loads(text, object_pairs_hook=_object_of)
            found = from_document(_PlanJson, document, "plan")
            buckets = tuple(each.to_spec(i) for i, each in enumerate(found.buckets))
            plan = cls(buckets, found.generation)
            count = len(plan.bucket_of_parameter)
            if beyond := [g for bucket in buckets for g in bucket.gradients if g.index >= count]:
                number = f"has number {beyond[0].index}, but the plan has {number_of(count, 'parameter')}"
                raise ValueError(f"parameter {beyond[0].fqn!r} {number}")
            return plan
        except ValueError as error:
            raise ValueError(
                f"bucket plan is malformed: {error}. Pass the unchanged text that BucketPlan.to_json() returned, with"
                " the same version of ddp_compile"
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, for ``ddp_compile(model, bucket_plan=path)``. Call it on one rank.

        Args:
            path: The file, which is replaced as a whole.
        """
        beside = Path(f"{os.fspath(path)}.{os.getpid()}.tmp")
        beside.write_text(self.to_json() + "\n")
        beside.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The plan that `save` wrote.

        Args:
            path: The file.

        Raises:
            ValueError: The file cannot be read, or is not a plan.
        """
        try:
            return cls.from_json(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"bucket plan {os.fspath(path)!r} cannot be loaded: {error}") from error

    def format_table(self) -> str:
        """The plan as a table for people, one line for each bucket in launch order."""
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
            f"{number_of(len(self.buckets), 'bucket')}, {number_of(len(self.bucket_of_parameter), 'gradient')},"
            f" {self.num_bytes / 2**20:.2f} MiB, generation {self.generation}, plan {self.digest}"
        )
        return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows), total])


@dataclass(frozen=True, slots=True)
class _BucketJson:
    cap_bytes: int
    device: str
    dtype: str
    frame: int | None
    gradients: tuple[tuple[int, str, int, int | None], ...]
    layout: Layout
    param_dtype: str | None
    sparse: bool

    def to_spec(self, index: int) -> BucketSpec:
        where = f"plan.buckets[{index}]"
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"{where}.dtype is {self.dtype!r}, not the name of a dtype of torch")
        if len(self.gradients) != 1 and (self.sparse or not self.gradients):
            limit = "1 gradient, since it is sparse" if self.sparse else "at least 1 gradient"
            raise ValueError(f"{where} has {number_of(len(self.gradients), 'gradient')}, but must have {limit}")
        if self.cap_bytes < 1:
            raise ValueError(f"{where}.cap_bytes is {self.cap_bytes}, not at least 1")
        gradients = tuple(
            GradientSpec(number, fqn, numel, self.dtype, self.device, self.sparse, owner, self.param_dtype)
            for number, fqn, numel, owner in self.gradients
        )
        return BucketSpec(index, gradients, self.cap_bytes, self.frame, self.layout)


@dataclass(frozen=True, slots=True)
class _PlanJson:
    version: Literal[3]  #: `_JSON_VERSION`
    generation: int
    buckets: tuple[_BucketJson, ...]


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if repeated := [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]:
        raise ValueError(f"{repeated} appear twice in one object")
    return dict(pairs)


def renumbered(buckets: Iterable[BucketSpec]) -> tuple[BucketSpec, ...]:
    return tuple(replace(bucket, index=i) for i, bucket in enumerate(buckets))
