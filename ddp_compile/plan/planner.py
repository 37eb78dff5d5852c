"""Planners: which gradients share a bucket.

Note [Atoms]
A planner is given atoms in the order in which they become ready, and returns groups of them. It knows neither graphs
nor regions nor the eager tail. What must not share a bucket has another `Atom.kind`. What becomes ready at once, such
as the gradients of a region, is in one `Atom.run`. Frames and the eager tail are planned one after the other.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ddp_compile.plan.costs import Costs
from ddp_compile.plan.optimum import Piece, merged, optimal_ends
from ddp_compile.plan.schedule import Load, predict
from ddp_compile.plan.spec import PADDED_ALIGNMENT_BYTES, GradientSpec

#: Dtype and device, those of all gradients of a bucket; and for a sparse gradient its index, since it is alone.
Kind = tuple[str, str, int | None]

#: With more changes of the kind, a bucket for each of them is too small to be part of a good plan.
MOST_CHANGES = 48


class Atom(NamedTuple):
    """A gradient to be planned."""

    gradient: GradientSpec
    place: int  #: in the order in which gradients become ready
    run: int | None  #: ordinal of the atoms that become ready all at once; None if it becomes ready alone

    @property
    def kind(self) -> Kind:
        gradient = self.gradient
        return gradient.dtype, gradient.device, gradient.index if gradient.is_sparse else None


class Group(NamedTuple):
    """Atoms of one kind, for one bucket."""

    atoms: Sequence[Atom]
    cap_bytes: int  #: the capacity to which it was filled


class Planner(ABC):
    """Groups gradients into buckets."""

    @abstractmethod
    def group(self, atoms: Sequence[Atom]) -> list[Group]:
        """Groups of one kind each, that hold every atom once, in the order of their last atoms.

        Args:
            atoms: In the order in which they become ready.
        """


def atoms_of(gradients: Iterable[GradientSpec], region_of: Mapping[int, int] = MappingProxyType({})) -> list[Atom]:
    """The atoms of gradients in the order in which these become ready.

    Args:
        gradients: Those of a region are consecutive.
        region_of: The region of each parameter that is in one, by index.
    """
    atoms: list[Atom] = []
    for run, (region, members) in enumerate(itertools.groupby(gradients, lambda each: region_of.get(each.index))):
        coming = [Atom(gradient, 0, None if region is None else run) for gradient in members]
        if region is not None:
            # Each kind together, since the order within a run is free, and sparse gradients first.
            streams = sorted(streams_of(coming), key=lambda stream: not stream[0].gradient.is_sparse)
            coming = [atom for stream in streams for atom in stream]
        atoms += coming
    return [atom._replace(place=place) for place, atom in enumerate(atoms)]


def streams_of(atoms: Iterable[Atom]) -> list[list[Atom]]:
    """The atoms of each kind."""
    streams: dict[Kind, list[Atom]] = {}
    for atom in atoms:
        streams.setdefault(atom.kind, []).append(atom)
    return list(streams.values())


def _num_padded_bytes(atoms: Iterable[Atom]) -> int:
    """What atoms take in a bucket of the padded layout."""
    return sum(-(-atom.gradient.num_bytes // PADDED_ALIGNMENT_BYTES) for atom in atoms) * PADDED_ALIGNMENT_BYTES


def in_launch_order(groups: Iterable[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group.atoms[-1].place)


@dataclass(frozen=True, slots=True)
class Capacities(Planner):
    """Fills buckets up to capacities. Each kind uses the capacities in turn, separately from others.

    Args:
        caps_bytes: One capacity for each bucket. The last one holds for all further buckets.

    Raises:
        ValueError: There is no capacity, or one is not positive.

    Source: ``compute_bucket_assignment_by_size`` of torch 2.13, csrc/distributed/c10d/reducer.cpp.
    """

    caps_bytes: Sequence[int]

    def __post_init__(self) -> None:
        if not self.caps_bytes or any(cap <= 0 for cap in self.caps_bytes):
            raise ValueError(
                f"bucket capacities {list(self.caps_bytes)} (bytes) must be positive and at least one must be given"
            )

    def group(self, atoms: Sequence[Atom]) -> list[Group]:
        return in_launch_order(group for stream in streams_of(atoms) for group in self._fill(stream))

    def _fill(self, stream: Sequence[Atom]) -> list[Group]:
        """Groups of one kind. A bucket closes when it has reached its capacity.

        If a run is smaller than the capacity, a bucket takes all of it. Otherwise no bucket mixes it with others.
        """
        if stream[0].gradient.is_sparse:
            return [Group(stream, self.caps_bytes[-1])]
        filling = _Filling(self.caps_bytes)
        for run, members in itertools.groupby(stream, key=lambda atom: atom.run):
            coming = list(members)
            if run is not None and not filling.can_hold(coming):
                filling.close()  # earlier gradients must not wait for the run
            if run is not None and filling.can_hold(coming):
                filling.add(coming)
                continue
            for atom in coming:
                filling.add([atom])
            if run is not None:
                filling.close()
        filling.close()
        return filling.closed


class _Filling:
    """Groups of one kind that are being filled."""

    def __init__(self, caps_bytes: Sequence[int]) -> None:
        self.closed: list[Group] = []
        self._caps_bytes = caps_bytes
        self._open: list[Atom] = []
        self._num_bytes = 0

    @property
    def cap_bytes(self) -> int:
        """Capacity of the open group, or of the next one if none is open."""
        return self._caps_bytes[min(len(self.closed), len(self._caps_bytes) - 1)]

    def can_hold(self, atoms: Sequence[Atom]) -> bool:
        """Whether all these atoms fit into one bucket of the present capacity."""
        return sum(atom.gradient.num_bytes for atom in atoms) < self.cap_bytes

    def add(self, atoms: Sequence[Atom]) -> None:
        self._open += atoms
        self._num_bytes += sum(atom.gradient.num_bytes for atom in atoms)
        if self._num_bytes >= self.cap_bytes:
            self.close()

    def close(self) -> None:
        if self._open:
            self.closed.append(Group(self._open, self.cap_bytes))
            self._open, self._num_bytes = [], 0


@dataclass(frozen=True, slots=True)
class LeastTime(Planner):
    """Ends the step as early as possible by its costs; see `ddp_compile.plan.optimum` for when that is exact.

    Gradients of several dtypes or devices are planned twice: each kind as if it were alone, and all together with a
    boundary wherever the kind changes, unless it changes more than `MOST_CHANGES` times. The better one is taken, which
    need not be the best one of all.

    Args:
        costs: Of the model's gradients, by index.
        largest_bytes: No bucket of several gradients is larger.
    """

    costs: Costs
    largest_bytes: int | None = None

    def group(self, atoms: Sequence[Atom]) -> list[Group]:
        streams = streams_of(atoms)
        plans = [in_launch_order(group for stream in streams for group in self._cut(stream))]
        num_changes = sum(before.kind != atom.kind for before, atom in itertools.pairwise(atoms))
        if len(streams) <= 1 or num_changes > MOST_CHANGES:
            return plans[0]
        return min([*plans, self._cut(atoms)], key=self._step_s)

    def _cut(self, atoms: Sequence[Atom]) -> list[Group]:
        kinds = [atom.kind for atom in atoms]
        opens = [False, *(kind != before for before, kind in itertools.pairwise(kinds))]
        pieces = [Piece(self._load(atom), opens_here) for atom, opens_here in zip(atoms, opens, strict=True)]
        ends = optimal_ends(pieces, self.costs, self.largest_bytes)
        loads = merged(pieces, ends)
        return [
            Group(atoms[begin:end], max(1, load.num_bytes))
            for begin, end, load in zip([0, *ends[:-1]], ends, loads, strict=True)
        ]

    def _load(self, atom: Atom) -> Load:
        index, needed_s = atom.gradient.index, self.costs.needed_s
        return Load(_num_padded_bytes([atom]), self.costs.ready_s[index], needed_s[index] if needed_s else 0.0)

    def _step_s(self, groups: Sequence[Group]) -> float:
        loads = [merged([Piece(self._load(atom)) for atom in group.atoms], [len(group.atoms)])[0] for group in groups]
        return predict(loads, self.costs).step_s
