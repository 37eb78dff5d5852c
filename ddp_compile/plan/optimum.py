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
them, closer each time. The result is not proved to be the optimum.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_compile.plan.costs import Costs
from ddp_compile.plan.schedule import Load, predict

#: Up to so many pieces, plans for sharded optimizers are optimal.
EXACT_PIECES = 48
#: With more pieces, the first boundaries are chosen from about so many places, evenly by bytes.
COARSE_PIECES = 16
#: Each time, places are this many times closer. With more than 3, steps of -1, 0 and 1 would leave gaps between places.
_CLOSER = 3
#: The search ends when boundaries have been moved by at most the number of pieces divided by this.
_FINEST = 1000
#: With more places, which only a small limit for buckets asks for, the best known boundaries are not moved: it would
#: take seconds, and has been seen to gain nothing.
_MOST_PLACES = 4 * EXACT_PIECES
#: What a launch of a refined plan costs at least, in seconds, so that of equal plans one of few buckets is chosen.
_LEAST_LAUNCH_S = 1e-6

#: Times that differ by less are taken to be equal, so that rounding does not multiply the labels.
_EPSILON_S = 1e-12
#: Up to this many labels, one tensor operation compares every pair.
_AT_ONCE = 400


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
    problem = _Problem.of([piece.load for piece in pieces], [piece.opens for piece in pieces], largest_bytes)
    if costs.gather is None:
        return _with_launches(problem, costs) if costs.launch_s else _without_launches(problem, costs)
    ends = min(_known_plans(problem, costs), key=lambda ends: predict(problem.loads(ends), costs).step_s)
    if len(pieces) <= EXACT_PIECES:
        return _with_gathers(problem, costs, ends)
    return _refined(problem, costs, ends, largest_bytes)


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
    def of(cls, loads: Sequence[Load], opens: Sequence[bool], largest_bytes: int | None) -> _Problem:
        sent = [0.0, *itertools.accumulate(float(load.num_bytes) for load in loads)]
        ready_s = [0.0, *itertools.accumulate((load.ready_s for load in loads), max)]
        needed_s = list(itertools.accumulate((load.needed_s for load in loads), min))
        first, least = [0], 0
        for i, opens_here in enumerate(opens):
            if opens_here:
                least = i
            while largest_bytes is not None and least < i and sent[i + 1] - sent[least] > largest_bytes:
                least += 1
            first.append(least)
        return cls(sent, ready_s, [needed_s[0], *needed_s], first)

    def loads(self, ends: Sequence[int]) -> list[Load]:
        """Those of the buckets that end there, for `predict`: needed when the first of all before is, see the note."""
        pairs = itertools.pairwise([0, *ends])
        return [Load(int(self.sent[end] - self.sent[j]), self.ready_s[end], self.needed_s[end]) for j, end in pairs]


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


def _refined(problem: _Problem, costs: Costs, ends: list[int], largest_bytes: int | None) -> list[int]:
    """Boundaries from coarse to fine, see Note [Two transfers a bucket]. ``ends`` are the best ones known."""
    costs = replace(costs, launch_s=max(costs.launch_s, _LEAST_LAUNCH_S))
    last = len(problem.sent) - 1
    shares = [problem.sent[-1] * i / COARSE_PIECES for i in range(1, COARSE_PIECES)]
    places = {*ends, *(bisect.bisect_left(problem.sent, share) for share in shares)}
    reach = 2 * last // COARSE_PIECES
    while True:
        chosen = _with_room(sorted(place for place in places if 0 < place <= last), problem.first)
        if len(chosen) > _MOST_PLACES:
            return ends
        opens = [problem.first[begin + 1] == begin for begin in [0, *chosen[:-1]]]
        part = _Problem.of(problem.loads(chosen), opens, largest_bytes)
        number_of = {end: number for number, end in enumerate(chosen, start=1)}
        known = [number_of[end] for end in ends]
        ends = [chosen[number - 1] for number in _with_gathers(part, costs, known)]
        if reach <= max(1, last // _FINEST):
            return ends
        reach = max(1, reach // _CLOSER)
        places = {*ends, *(end + step for end in ends for step in (-reach, reach))}


def _with_room(places: Sequence[int], first: Sequence[int]) -> list[int]:
    """The places, and those that are needed so that no bucket between two of them is too large, or of two kinds."""
    chosen = [0]
    for place in places:
        while first[place] > chosen[-1]:
            chosen.append(bisect.bisect_right(first, chosen[-1]) - 1)
        chosen.append(place)
    return list(dict.fromkeys(chosen))[1:]


def _with_gathers(problem: _Problem, costs: Costs, known: list[int]) -> list[int]:
    """Note [Two transfers a bucket]. The labels have L + k launch_s for L, which the end of the step depends on."""
    bounds = _Bounds(problem, costs)
    best_s = bounds.end_s(predict(problem.loads(known), costs).step_s)
    labels, num_pieces = _Labels(), len(problem.sent) - 1
    for i in range(1, num_pieces + 1):
        begin, values = labels.since(max(problem.first[i], bounds.first(i, best_s)))
        found = bounds.extended(values, i)
        alive = torch.nonzero(bounds.least_end_s(found, i) < best_s - _EPSILON_S).squeeze(1)
        found = found[:, alive]
        kept = _undominated(bounds.until_next(found, i))
        labels.add(found[:, kept], alive[kept] + begin)
    return labels.best_ends() or known


def _known_plans(problem: _Problem, costs: Costs) -> list[list[int]]:
    """Plans of not too many buckets that are good, if not the best: of capacities, and the best one without gathers."""
    last = len(problem.sent) - 1
    plans = [_with_launches(problem, costs) if costs.launch_s else _without_launches(problem, costs)]
    cap_bytes = max(problem.sent[-1], 1.0)
    for _ in range(15):
        ends = [0]
        while ends[-1] < last:
            full = bisect.bisect_left(problem.sent, problem.sent[ends[-1]] + cap_bytes, ends[-1] + 1)
            ends.append(min(full, last, bisect.bisect_right(problem.first, ends[-1]) - 1))
        plans.append(ends[1:])
        cap_bytes /= 2**0.5
    most = max(EXACT_PIECES, min(map(len, plans)))
    return [ends for ends in plans if len(ends) <= most]


class _Labels:
    """Undominated labels by position: rows F, W, L + k launch_s, k, and the bytes of the pieces up to there."""

    def __init__(self) -> None:
        self._values = torch.zeros(5, 1024, dtype=torch.float64)
        self._values[1, 0] = -torch.inf
        self._parents = torch.zeros(1024, dtype=torch.int64)
        self._begins = [0, 1]  # of the labels of each position

    def since(self, position: int) -> tuple[int, Tensor]:
        """The number of the first label of a position, and the values from there on."""
        begin, end = self._begins[position], self._begins[-1]
        return begin, self._values[:, begin:end]

    def add(self, values: Tensor, parents: Tensor) -> None:
        """The labels of the next position."""
        begin = self._begins[-1]
        end = begin + values.shape[1]
        while end > self._values.shape[1]:
            self._values = torch.cat([self._values, torch.zeros_like(self._values)], dim=1)
            self._parents = torch.cat([self._parents, torch.zeros_like(self._parents)])
        self._values[:, begin:end], self._parents[begin:end] = values, parents
        self._begins.append(end)

    def best_ends(self) -> list[int]:
        """The boundaries of the best label of the last position; none if there is no label."""
        begin, end = self._begins[-2:]
        if begin == end:
            return []
        label = begin + int((self._values[0, begin:end] + self._values[2, begin:end]).argmin())
        ends = []
        while label:
            ends.append(bisect.bisect_right(self._begins, label) - 1)
            label = int(self._parents[label])
        return ends[::-1]


class _Bounds:
    """How labels grow, and what they come to at least.

    Args:
        problem: The pieces.
        costs: Those of one launch, of both transfers and of the step.
    """

    def __init__(self, problem: _Problem, costs: Costs) -> None:
        assert costs.gather is not None
        self._problem, self._costs, self._reduce, self._gather = problem, costs, costs.reduce, costs.gather
        sent, ready_s = problem.sent, problem.ready_s
        rest = [sent[-1] - each for each in sent]
        last_s = [ready + costs.reduce.time_s(left) for ready, left in zip(ready_s[1:], rest, strict=False)]
        #: The earliest end of transfers by the pieces after i, without their launches.
        self._tail_s = [*itertools.accumulate(last_s[::-1], max, initial=0.0)][::-1]
        gathers = [costs.gather.time_s(left) - needed for left, needed in zip(rest, problem.needed_s[1:], strict=False)]
        #: The least L + k launch_s of any plan.
        self._late_s = costs.launch_s + max(max(gathers) - costs.step_s_per_byte * sent[-2], 0.0)

    def end_s(self, step_s: float) -> float:
        """The part of a step that depends on boundaries."""
        return step_s - self._costs.step_s_per_byte * self._problem.sent[-1] - self._costs.forward_s

    def first(self, i: int, best_s: float) -> int:
        """The least j so that a bucket of pieces j + 1 to i may be part of a better plan."""
        sent, reduce = self._problem.sent, self._reduce
        free_s = best_s - self._late_s - self._costs.launch_s - reduce.latency_s - self._problem.ready_s[i]
        return min(bisect.bisect_left(sent, sent[-1] - (free_s + _EPSILON_S) / reduce.s_per_byte), i - 1)

    def extended(self, labels: Tensor, i: int) -> Tensor:
        """Labels of position i by one more bucket."""
        problem, reduce, gather, launch_s = self._problem, self._reduce, self._gather, self._costs.launch_s
        free_s, wait_s, late_s, number, before = labels
        num_bytes = problem.sent[i] - before
        number = number + 1
        free_s = torch.maximum(free_s, problem.ready_s[i] + number * launch_s)
        free_s += num_bytes * reduce.s_per_byte + reduce.latency_s
        wait_s = wait_s.clamp(min=-problem.needed_s[i]) + (num_bytes * gather.s_per_byte + gather.latency_s)
        late_s = torch.maximum(late_s, wait_s - self._costs.step_s_per_byte * before) + launch_s
        return torch.stack([free_s, wait_s, late_s, number, torch.full_like(number, problem.sent[i])])

    def least_end_s(self, labels: Tensor, i: int) -> Tensor:
        """What a plan that begins with these labels of position i comes to at least."""
        problem, launch_s = self._problem, self._costs.launch_s
        free_s, wait_s, late_s, number, _ = labels
        if i == len(problem.sent) - 1:
            return free_s + late_s
        rest = problem.sent[-1] - problem.sent[i]
        reduced_s = torch.maximum(free_s + self._reduce.time_s(rest), number * launch_s + (self._tail_s[i] + launch_s))
        wait_s = wait_s + (self._gather.time_s(rest) - self._costs.step_s_per_byte * problem.sent[-2])
        return reduced_s + (torch.maximum(late_s, wait_s).clamp(min=self._late_s - launch_s) + launch_s)

    def until_next(self, labels: Tensor, i: int) -> Tensor:
        """What matters to the next bucket: numbers that are too small to do so are made equal."""
        problem, launch_s = self._problem, self._costs.launch_s
        free_s, wait_s, late_s, number, _ = labels
        if i == len(problem.sent) - 1:
            return (free_s + late_s)[None]
        launches_s = number * launch_s
        wait_s = wait_s.clamp(min=-problem.needed_s[i + 1])
        return torch.stack(
            [
                torch.maximum(free_s, launches_s + (problem.ready_s[i + 1] + launch_s)),
                wait_s,
                torch.maximum(late_s, wait_s - self._costs.step_s_per_byte * problem.sent[i]),
                launches_s,
            ]
        )


def _undominated(values: Tensor) -> Tensor:
    """The numbers of the columns that no other column is below, or equal to, in all rows."""
    order, kept = values.sum(0).argsort(), []
    while len(order) > _AT_ONCE:
        column = order[0]
        kept.append(column)
        inside = values[:, order] < values[:, column, None] - _EPSILON_S
        order = order[inside.any(0)]
    ordered = values[:, order]
    below = (ordered[:, :, None] <= ordered[:, None, :] + _EPSILON_S).all(0).triu_(1)
    rest = order[~below.any(0)]
    return torch.cat([torch.stack(kept), rest]) if kept else rest
