"""Bucket boundaries that end a step as early as possible, exactly.

Gradients keep their order, so a plan is a set of boundaries. `predict` says when a step ends; see Note [The model of a
step]. S(i) is the number of bytes of the first i gradients, and R(i) the time at which they are ready.

Note [One transfer a bucket]
Let F(i) be the earliest end of transfers that carry the first i gradients. With a last bucket of gradients j + 1 to i

    F(i) = min over j of  max(F(j), R(i)) + alpha + beta (S(i) - S(j)).

Only two j matter. F grows with i, since a schedule without its last gradients is one of a shorter prefix. If F(j) <=
R(i), the largest such j is best, since least remains to be sent. Otherwise the term is F(j) - beta S(j) plus what does
not depend on j. That grows with j too, since removing gradients shortens the transfers by their bytes at least. So the
smallest such j is best.

With a cost for each launch, R(i) depends on the number of launches, and F becomes one function for each number c:

    F(c, i) = min over j of  max(H(c - 1, j), R(i) + c launch_s) + alpha + beta (S(i) - S(j)),

where H(c, j) is the least of F(1, j) to F(c, j). Taking a schedule of fewer launches for one of c delays it without
need, but it counts itself for its own number. The arguments above hold for H, so each c takes a few operations on
arrays. Once a c improves no F(c, i), no larger one does, since its launches are later.

Note [Two transfers a bucket]
With a sharded optimizer each bucket is gathered too. Count time from the beginning of the forward, and buckets in
launch order. Bucket k, of gradients j + 1 to i, has been stepped at A(k) = -(step_s_per_byte S(j) + (k - 1) launch_s).
The forward waits for

    L = max over k <= l of  A(l) + gathers of l, l - 1, ..., k - needed(k).

For needed(k) stands the earliest need of the first i gradients. That changes nothing, since those before bucket k are
gathered later. So three numbers say all about the first k buckets: when the link is free, F; how late gathers get that
begin with the k-th, W = gather(k) + max(W of the buckets before, -needed(k)); and L so far. Labels (F, W, L, k) that
another label beats in all four are dropped, and so are those whose bound exceeds the best plan known.

That is exact, and too slow for thousands of gradients. So if there are more than `EXACT_PIECES`, some places for
boundaries are chosen, evenly by bytes. Then the boundaries that are best there are moved: places are chosen around
them, twice as close each time, until they are next to each other. The result is not proved to be the optimum.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_compile.plan.costs import Collective, Costs
from ddp_compile.plan.schedule import Load, predict

#: Up to so many pieces, plans for sharded optimizers are optimal.
EXACT_PIECES = 48

#: Times that differ by less are taken to be equal, so that rounding does not multiply the labels.
_EPSILON_S = 1e-12


class Piece(NamedTuple):
    """What cannot be divided, and what it asks."""

    load: Load
    opens: bool = False  #: whether it must not share a bucket with the piece before


def optimal_ends(pieces: Sequence[Piece], costs: Costs, largest_bytes: int | None = None) -> list[int]:
    """Where each bucket ends, so that the step ends as early as possible.

    Args:
        pieces: In launch order.
        largest_bytes: No bucket of several pieces is larger, to bound the memory that is in use at a time.

    Returns:
        For each bucket, the number of pieces in it and in those before.
    """
    if not pieces:
        return []
    problem = _Problem.of(pieces, largest_bytes)
    if costs.gather is not None:
        plans = _known_plans(problem, costs)
        few = [ends for ends in plans if len(ends) <= EXACT_PIECES] or plans
        ends = min(few, key=lambda ends: predict(merged(pieces, ends), costs).step_s)
        if len(pieces) <= EXACT_PIECES:
            return _with_gathers(problem, costs, pieces, ends)
        return _refined(problem, costs, pieces, ends, largest_bytes)
    return _with_launches(problem, costs) if costs.launch_s else _without_launches(problem, costs)


def merged(pieces: Sequence[Piece], ends: Sequence[int]) -> list[Load]:
    """The loads of the buckets that end there."""
    loads = []
    for begin, end in itertools.pairwise([0, *ends]):
        sizes, ready_s, needed_s = zip(*(piece.load for piece in pieces[begin:end]), strict=True)
        loads.append(Load(sum(sizes), max(ready_s), min(needed_s)))
    return loads


@dataclass(frozen=True, slots=True)
class _Problem:
    """What the pieces ask, by their number from 1 on. Number 0 stands for none.

    Args:
        sent: Bytes of the first i pieces.
        ready_s: When all of them are ready.
        needed_s: When the first of them is needed.
        first: The least j so that pieces j + 1 to i may share a bucket.
    """

    sent: list[float]
    ready_s: list[float]
    needed_s: list[float]
    first: list[int]

    @classmethod
    def of(cls, pieces: Sequence[Piece], largest_bytes: int | None) -> _Problem:
        sent = [0.0, *itertools.accumulate(float(piece.load.num_bytes) for piece in pieces)]
        ready_s = [0.0, *itertools.accumulate((piece.load.ready_s for piece in pieces), max)]
        needed_s = list(itertools.accumulate((piece.load.needed_s for piece in pieces), min))
        first, least = [0], 0
        for i, piece in enumerate(pieces):
            if piece.opens:
                least = i
            while largest_bytes is not None and least < i and sent[i + 1] - sent[least] > largest_bytes:
                least += 1
            first.append(least)
        return cls(sent, ready_s, [needed_s[0], *needed_s], first)


def _backtrack(before: Sequence[int], end: int) -> list[int]:
    ends = []
    while end:
        ends.append(end)
        end = before[end]
    return ends[::-1]


def _without_launches(problem: _Problem, costs: Costs) -> list[int]:
    """Note [One transfer a bucket], if launches cost nothing."""
    num_pieces, latency_s, s_per_byte = len(problem.sent) - 1, costs.reduce.latency_s, costs.reduce.s_per_byte
    free_s, before, busy = [0.0] * (num_pieces + 1), [0] * (num_pieces + 1), 0
    for i in range(1, num_pieces + 1):
        ready_s, least = problem.ready_s[i], problem.first[i]
        while busy < i and free_s[busy] <= ready_s:
            busy += 1  # the smallest j after which the link is still busy when i is ready
        best = max(least, busy - 1)
        end_s = max(free_s[best], ready_s) - s_per_byte * problem.sent[best]
        if least < busy < i and free_s[busy] - s_per_byte * problem.sent[busy] < end_s:
            best, end_s = busy, free_s[busy] - s_per_byte * problem.sent[busy]
        free_s[i], before[i] = end_s + latency_s + s_per_byte * problem.sent[i], best
    return _backtrack(before, num_pieces)


def _with_launches(problem: _Problem, costs: Costs) -> list[int]:
    """Note [One transfer a bucket], one number of launches after the other."""
    sent, ready_s = (torch.tensor(each, dtype=torch.float64) for each in (problem.sent, problem.ready_s))
    sending_s, last = costs.reduce.s_per_byte * sent, torch.arange(-1, len(sent) - 1)
    first = torch.tensor(problem.first)
    held_s = torch.full_like(sent, torch.inf)
    held_s[0] = 0.0
    before: list[tuple[int, Tensor]] = []
    begin = 1
    for number in itertools.count(1):
        launched_s = ready_s[begin:] + number * costs.launch_s
        # The last piece is launched after all launches, and the link is never free if it is slow.
        least_s = max(
            float(launched_s[-1]) + costs.reduce.time_s(problem.sent[-1] - problem.sent[-2]),
            float(ready_s[1]) + costs.launch_s + number * costs.reduce.latency_s + float(sending_s[-1]),
        )
        busy = torch.searchsorted(held_s, launched_s, right=True)
        chosen = [torch.maximum(first[begin:], torch.minimum(last[begin:], j)) for j in (busy - 1, busy)]
        ends = [torch.maximum(held_s[j], launched_s) - sending_s[j] for j in chosen]
        end_s = torch.minimum(*ends) + costs.reduce.latency_s + sending_s[begin:]
        better = end_s < held_s[begin:]
        if not better.any() or held_s[-1] <= least_s:
            break
        # -1 stands for a schedule of fewer launches.
        before.append((begin, torch.where(better, torch.where(ends[1] < ends[0], chosen[1], chosen[0]), -1)))
        held_s[begin:] = torch.where(better, end_s, held_s[begin:])
        # With one more launch, only schedules that extend one improved just now can end earlier: others launch later.
        begin += int(better.nonzero()[0, 0]) + 1
        if begin == len(sent):
            break
    result, end = [], len(sent) - 1
    for first_piece, choices in reversed(before):
        if end >= first_piece and (j := int(choices[end - first_piece])) >= 0:
            result.append(end)
            end = j
    return result[::-1]


def _refined(
    problem: _Problem, costs: Costs, pieces: Sequence[Piece], ends: list[int], largest_bytes: int | None
) -> list[int]:
    """Boundaries from coarse to fine, see Note [Two transfers a bucket]. ``ends`` are the best ones known."""
    last = len(pieces)
    shares = [problem.sent[-1] * i / EXACT_PIECES for i in range(1, EXACT_PIECES)]
    places = {*ends, *(bisect.bisect_left(problem.sent, share) for share in shares)}
    reach = last
    while True:
        chosen = _with_room(sorted(place for place in places if 0 < place <= last), problem.first)
        parts = [
            Piece(load, pieces[begin].opens)
            for load, begin in zip(merged(pieces, chosen), [0, *chosen[:-1]], strict=True)
        ]
        numbers = {place: number for number, place in enumerate(chosen, start=1)}
        known = [numbers[end] for end in ends]
        ends = [chosen[number - 1] for number in _with_gathers(_Problem.of(parts, largest_bytes), costs, parts, known)]
        if reach == 1:
            return ends
        reach = max(1, min(reach, 2 * last // EXACT_PIECES) // 2)
        places = {*ends, *(end + step for end in ends for step in (-reach, reach))}


def _with_room(places: Sequence[int], first: Sequence[int]) -> list[int]:
    """The places, and those that are needed so that no bucket between two of them is too large, or of two kinds."""
    chosen = [0]
    for place in places:
        while first[place] > chosen[-1]:
            chosen.append(bisect.bisect_right(first, chosen[-1]) - 1)
        chosen.append(place)
    return list(dict.fromkeys(chosen))[1:]


def _with_gathers(problem: _Problem, costs: Costs, pieces: Sequence[Piece], known: list[int]) -> list[int]:
    """Note [Two transfers a bucket]. The labels have L + k launch_s for L, which the end of the step depends on."""
    bounds = _Bounds.of(problem, costs)
    best_s = bounds.end_s(predict(merged(pieces, known), costs).step_s)
    labels, num_pieces = _Labels(), len(problem.sent) - 1
    for i in range(1, num_pieces + 1):
        begin = max(problem.first[i], bounds.first(i, best_s))
        came_from, values = labels.since(begin)
        found = bounds.extended(values, labels.positions_since(begin), i)
        alive = torch.nonzero(bounds.least_end_s(found, i) < best_s - _EPSILON_S).squeeze(1)
        found, came_from = found[:, alive], came_from[alive]
        kept = _undominated(bounds.until_next(found, i))
        labels.add(i, found[:, kept], came_from[kept])
    return labels.best_ends() or known


def _known_plans(problem: _Problem, costs: Costs) -> list[list[int]]:
    """Plans that are good, if not the best: those of capacities, and that which is best without gathers."""
    plans = [_with_launches(problem, costs) if costs.launch_s else _without_launches(problem, costs)]
    cap_bytes = max(problem.sent[-1], 1.0)
    while len(plans) < 24 and len(plans[-1]) < len(problem.sent) - 1:
        ends: list[int] = []
        begin = 0
        for i in range(1, len(problem.sent)):
            if problem.first[i] > begin:
                ends.append(i - 1)
                begin = i - 1
            if problem.sent[i] - problem.sent[begin] >= cap_bytes:
                ends.append(i)
                begin = i
        plans.append(ends if begin == len(problem.sent) - 1 else [*ends, len(problem.sent) - 1])
        cap_bytes /= 2**0.5
    return plans


class _Labels:
    """Undominated labels by position: rows F, W, L + k launch_s and k."""

    def __init__(self) -> None:
        self._values = torch.zeros(4, 1024, dtype=torch.float64)
        self._values[1, 0] = -torch.inf
        self._parents, self._positions = (torch.zeros(1024, dtype=torch.int64) for _ in range(2))
        self._begins = [0, 1]  # of the labels of each position

    def since(self, position: int) -> tuple[Tensor, Tensor]:
        """Numbers and values of the labels from a position on."""
        begin, end = self._begins[position], self._begins[-1]
        return torch.arange(begin, end), self._values[:, begin:end]

    def positions_since(self, position: int) -> Tensor:
        return self._positions[self._begins[position] : self._begins[-1]]

    def add(self, position: int, values: Tensor, parents: Tensor) -> None:
        begin = self._begins[-1]
        end = begin + values.shape[1]
        while end > self._values.shape[1]:
            self._values = torch.cat([self._values, torch.zeros_like(self._values)], dim=1)
            self._parents = torch.cat([self._parents, torch.zeros_like(self._parents)])
            self._positions = torch.cat([self._positions, torch.zeros_like(self._positions)])
        self._values[:, begin:end], self._parents[begin:end], self._positions[begin:end] = values, parents, position
        self._begins.append(end)

    def best_ends(self) -> list[int]:
        """The boundaries of the best label of the last position; none if there is no label."""
        begin, end = self._begins[-2:]
        if begin == end:
            return []
        label = begin + int((self._values[0, begin:end] + self._values[2, begin:end]).argmin())
        ends = []
        while label:
            ends.append(int(self._positions[label]))
            label = int(self._parents[label])
        return ends[::-1]


@dataclass(frozen=True, slots=True)
class _Bounds:
    """How labels grow, and what they come to at least.

    Args:
        sent: Bytes of the first i pieces, like the others for each i.
        ready_s: When they are ready.
        wanted_s: The negative of when the first of them is needed.
        tail_s: The earliest end of transfers by the pieces after i, without their launches.
        late_s: The least L + k launch_s of any plan.
        constant_s: Part of the step that depends on no boundary.
    """

    costs: Costs
    sent: Tensor
    ready_s: Tensor
    wanted_s: Tensor
    tail_s: Tensor
    late_s: float
    constant_s: float

    @classmethod
    def of(cls, problem: _Problem, costs: Costs) -> _Bounds:
        sent, ready_s, needed_s = (
            torch.tensor(each, dtype=torch.float64) for each in (problem.sent, problem.ready_s, problem.needed_s)
        )
        assert costs.gather is not None
        rest = sent[-1] - sent
        ends = ready_s[1:] + costs.reduce.latency_s + costs.reduce.s_per_byte * rest[:-1]
        tail_s = torch.cat([ends.flip(0).cummax(0).values.flip(0), torch.zeros(1, dtype=torch.float64)])
        gathers = costs.gather.latency_s + costs.gather.s_per_byte * rest[:-1] - needed_s[1:]
        late_s = float(gathers.max() - costs.step_s_per_byte * sent[-2]) + costs.launch_s
        constant_s = costs.step_s_per_byte * float(sent[-1]) + costs.forward_s
        return cls(costs, sent, ready_s, -needed_s, tail_s, max(late_s, costs.launch_s), constant_s)

    def end_s(self, step_s: float) -> float:
        """The part of a step that depends on boundaries."""
        return step_s - self.constant_s

    def first(self, i: int, best_s: float) -> int:
        """The least j so that a bucket of pieces j + 1 to i may be part of a better plan."""
        reduce = self.costs.reduce
        free_s = best_s - self.late_s - self.costs.launch_s - reduce.latency_s - float(self.ready_s[i])
        least = float(self.sent[-1]) - (free_s + _EPSILON_S) / reduce.s_per_byte
        return min(int(torch.searchsorted(self.sent, least)), i - 1)

    def extended(self, labels: Tensor, positions: Tensor, i: int) -> Tensor:
        """Labels of position i, from those of ``positions``, by one more bucket."""
        reduce, gather, launch_s = self.costs.reduce, self.costs.gather, self.costs.launch_s
        assert gather is not None
        before = self.sent[positions]
        num_bytes = self.sent[i] - before
        number = labels[3] + 1
        free_s = torch.maximum(labels[0], self.ready_s[i] + number * launch_s) + _times_s(reduce, num_bytes)
        wait_s = labels[1].clamp(min=float(self.wanted_s[i])) + _times_s(gather, num_bytes)
        late_s = torch.maximum(labels[2], wait_s - self.costs.step_s_per_byte * before) + launch_s
        return torch.stack([free_s, wait_s, late_s, number])

    def least_end_s(self, labels: Tensor, i: int) -> Tensor:
        """What a plan that begins with these labels of position i comes to at least."""
        reduce, gather, launch_s = self.costs.reduce, self.costs.gather, self.costs.launch_s
        assert gather is not None
        free_s, wait_s, late_s, number = labels
        if i == len(self.sent) - 1:
            return free_s + late_s
        rest = float(self.sent[-1] - self.sent[i])
        reduced_s = torch.maximum(free_s + reduce.time_s(rest), float(self.tail_s[i]) + (number + 1) * launch_s)
        wait_s = wait_s + gather.time_s(rest) - self.costs.step_s_per_byte * float(self.sent[-2])
        return reduced_s + torch.maximum(late_s, wait_s).clamp(min=self.late_s - launch_s) + launch_s

    def until_next(self, labels: Tensor, i: int) -> Tensor:
        """The same labels, with numbers that are too small to matter to the next bucket made equal."""
        if i == len(self.sent) - 1:
            return torch.stack([labels[0] + labels[2]])
        free_s, wait_s, late_s, number = labels
        launch_s = self.costs.launch_s
        wait_s = wait_s.clamp(min=float(self.wanted_s[i + 1]))
        return torch.stack(
            [
                torch.maximum(free_s, self.ready_s[i + 1] + (number + 1) * launch_s),
                wait_s,
                torch.maximum(late_s, wait_s - self.costs.step_s_per_byte * self.sent[i]),
                number * launch_s,
            ]
        )


def _times_s(collective: Collective, num_bytes: Tensor) -> Tensor:
    return collective.latency_s + collective.s_per_byte * num_bytes


def _undominated(values: Tensor) -> Tensor:
    """The numbers of the columns that no other column is below, or equal to, in all rows."""
    kept, remaining = [], values.sum(0).argsort()
    while len(remaining):
        column = remaining[0]
        kept.append(column)
        inside = values[:, remaining] < values[:, column, None] - _EPSILON_S
        remaining = remaining[inside.any(0)]
    return torch.stack(kept) if kept else remaining
