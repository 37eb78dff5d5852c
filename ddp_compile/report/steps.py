"""A measured step on every rank: when each bucket was ready, launched, transferred and waited for, and what follows.

All times are in seconds since the first rank of the report began the step, on one clock.

Note [What a step is]
A step begins with its first forward and ends when its backward has reduced all gradients. A sharded optimizer launches
its gathers after that, and they travel while the next forward computes. So they belong to the next step, which waits
for them. They may have been launched before it began; such times are negative.

Note [Late ranks]
A collective moves nothing before its last rank has launched it. So the time from one rank's launch to the end contains
the wait for the last rank. `Step.transfer_s` begins with the last launch, or with the end of the transfer before it,
since all transfers share one link. A wait before the last launch is a wait for a late rank; `Step.exposed_s` is the
wait after it. `Step.lateness_s` says which rank was late, and by how much.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median, median_low
from typing import Literal, NamedTuple

from ddp_compile.plan.spec import BucketPlan, BucketSpec
from ddp_compile.report.explanation import Explanation

Kind = Literal["reduce", "gather"]

#: What takes less than this share of a step is left out of its text.
LEAST_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One transfer of one bucket as one rank saw it.

    Args:
        bucket: Index of the bucket in the plan.
        kind: ``"reduce"`` for gradients, ``"gather"`` for the parameters of a sharded optimizer.
        num_bytes: Bytes of the flat buffer; what travels depends on the algorithm.
        ready: When all gradients were in the flat buffer, or the optimizer had stepped all of the bucket.
        launched: When the transfer was handed to the process group.
        launch_returned: When the algorithm's launch returned; long after ``launched`` if it waits inside.
        done: When the result was complete on this rank; None if the algorithm does not say.
        waited_from: When this rank began to wait for it; None if nothing waited.
        waited_until: When this rank went on.
    """

    bucket: int
    kind: Kind
    num_bytes: int
    ready: float
    launched: float
    launch_returned: float
    done: float | None
    waited_from: float | None
    waited_until: float | None

    @property
    def exposed_s(self) -> float:
        """How long this rank waited for it."""
        return sum(end - begin for begin, end in waits_of([self]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step of one rank.

    Args:
        rank: Global rank.
        began: When its first forward began.
        backward_began: When the first gradient of the iteration arrived; None if that is not known.
        ended: When all gradients had been handed over.
        transfers: In the order of their launches.
        drained_s: How long it waited for the algorithm as a whole, rather than for one of the transfers.
        counts_s: The part of ``drained_s`` for the counts of ``normalize_by``.
        clip_s: How long ``clip_grad_norm_`` took, since the step before.
    """

    rank: int
    began: float
    backward_began: float | None
    ended: float
    transfers: tuple[Transfer, ...]
    drained_s: float = 0.0
    counts_s: float = 0.0
    clip_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """How long this rank waited for communication: for each transfer, and for the algorithm as a whole."""
        return sum(transfer.exposed_s for transfer in self.transfers) + self.drained_s

    @property
    def duration_s(self) -> float:
        """From its first forward to the last gradient."""
        return self.ended - self.began

    @property
    def launching_s(self) -> float:
        """Time inside launches: more than a moment if an algorithm waits inside its ``launch``."""
        return self._length_within_s((t.launched, t.launch_returned) for t in self.transfers)

    @property
    def computation_s(self) -> float:
        """The rest of the step, without waits and launches."""
        launches = [(t.launched, t.launch_returned) for t in self.transfers]
        busy_s = self._length_within_s([*launches, *waits_of(self.transfers)])
        return max(0.0, self.duration_s - busy_s - self.drained_s)

    def _length_within_s(self, intervals: Iterable[tuple[float, float]]) -> float:
        """How much of the step these intervals cover."""
        return union_length((max(begin, self.began), min(end, self.ended)) for begin, end in intervals)


class TransferOverRanks(NamedTuple):
    """One transfer on all ranks that have it; see Note [Late ranks]."""

    bucket: int
    kind: Kind
    by_rank: Mapping[int, Transfer]
    launched: float  #: when the last rank launched it
    began: float  #: when the link was free after that
    done: float | None

    @property
    def transfer_s(self) -> float | None:
        return None if self.done is None else max(0.0, self.done - self.began)

    def exposed_s(self, rank: int) -> float:
        """How long a rank waited for it after the last rank had launched it."""
        return union_length((max(begin, self.launched), end) for begin, end in waits_of([self.by_rank[rank]]))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of all ranks; of one rank if it comes from ``model.comm_stats()``, which cannot see late ranks.

    Args:
        number: Number of the iteration, the same on every rank; the first one is 1.
        ranks: In the order of the process group.
    """

    number: int
    ranks: tuple[RankStep, ...]

    @cached_property
    def transfers(self) -> tuple[TransferOverRanks, ...]:
        """The transfers in the order of their launches, which is the same on every rank."""
        return tuple(_transfers_over_ranks(self.ranks))

    @property
    def duration_s(self) -> float:
        """From the first rank's begin to the last rank's end."""
        return max(rank.ended for rank in self.ranks) - min(rank.began for rank in self.ranks)

    @property
    def computation_s(self) -> float:
        """Median over the ranks."""
        return median(rank.computation_s for rank in self.ranks)

    @property
    def launching_s(self) -> float:
        """Median over the ranks."""
        return median(rank.launching_s for rank in self.ranks)

    @property
    def communication_s(self) -> float | None:
        """How long the link was busy, without waits for late ranks; None if the end of a transfer is not known."""
        ends = [(each.began, each.done) for each in self.transfers if each.done is not None]
        return union_length(ends) if len(ends) == len(self.transfers) else None

    @property
    def exposed_s(self) -> float:
        """The longest that a rank waited for communication, without its waits for late ranks."""
        return max(
            sum(each.exposed_s(rank.rank) for each in self.transfers if rank.rank in each.by_rank) + rank.drained_s
            for rank in self.ranks
        )

    @property
    def drained_s(self) -> float:
        """The longest that a rank waited for the algorithm as a whole."""
        return max(rank.drained_s for rank in self.ranks)

    @property
    def exposed_by_bucket(self) -> dict[int, float]:
        """For each bucket that was sent, the longest that a rank waited for it, without waits for late ranks."""
        exposed: dict[int, float] = {}
        for each in self.transfers:
            longest = max(each.exposed_s(rank) for rank in each.by_rank)
            exposed[each.bucket] = exposed.get(each.bucket, 0.0) + longest
        return exposed

    @property
    def most_exposed_bucket(self) -> int | None:
        """Index of the bucket that a rank waited for the longest; None if none waited."""
        exposed = self.exposed_by_bucket
        return max(exposed, key=lambda bucket: exposed[bucket]) if any(exposed.values()) else None

    def transfer_s(self, bucket: int, kind: Kind = "reduce") -> float | None:
        """How long a transfer occupied the link, see Note [Late ranks]; None if its end is not known.

        Args:
            bucket: Index of the bucket.
            kind: Which of its transfers.

        Raises:
            IndexError: There was no such transfer in this step.
        """
        times = [each.transfer_s for each in self.transfers if (each.bucket, each.kind) == (bucket, kind)]
        if not times:
            there = ", ".join(str(each.bucket) for each in self.transfers if each.kind == kind) or "none"
            raise IndexError(f"bucket={bucket!r} has no {kind} in step {self.number}; buckets that have one: {there}")
        return None if None in times else sum(time for time in times if time is not None)

    def lateness_s(self, rank: int) -> float:
        """By how much at most a rank launched a transfer later than the (lower) median of the ranks did.

        Args:
            rank: Global rank.

        Raises:
            ValueError: The step has no such rank.
        """
        self.of_rank(rank)
        late = [
            each.by_rank[rank].launched - median_low(other.launched for other in each.by_rank.values())
            for each in self.transfers
            if rank in each.by_rank
        ]
        return max([0.0, *late])

    @property
    def latest(self) -> tuple[int, float]:
        """The rank that was the latest, and by how many seconds."""
        return max(((rank.rank, self.lateness_s(rank.rank)) for rank in self.ranks), key=lambda found: found[1])

    def of_rank(self, rank: int) -> RankStep:
        """The step of one rank.

        Args:
            rank: Global rank.

        Raises:
            ValueError: The step has no such rank.
        """
        for each in self.ranks:
            if each.rank == rank:
                return each
        ranks = ", ".join(str(each.rank) for each in self.ranks)
        raise ValueError(f"rank={rank!r} is not in step {self.number}; it has the ranks {ranks}")

    @property
    def totals(self) -> dict[str, float | None]:
        """The times by what they are of, as in the columns of a report's table; None if not known."""
        return {
            "all": self.duration_s,
            "compute": self.computation_s,
            "launching": self.launching_s,
            "communication": self.communication_s,
            "exposed": self.exposed_s,
        }

    def scalars(self, prefix: str = "step") -> dict[str, float]:
        """The known `totals` in milliseconds for a logger of scalars, by names such as ``step/exposed_ms``."""
        return {f"{prefix}/{name}_ms": time * 1e3 for name, time in self.totals.items() if time is not None}

    def __str__(self) -> str:
        """One line: ``"compute 61 ms, communication 40 ms, exposed 7 ms (bucket 5), rank 3 late by 12 ms"``.

        Launches and late ranks are named if they take at least 1 % of the step.
        """
        least_s = LEAST_SHARE * self.duration_s
        parts = [f"compute {format_ms(self.computation_s)}"]
        if self.launching_s >= least_s:
            parts.append(f"launching {format_ms(self.launching_s)}")
        if self.transfers:
            parts.append(f"communication {format_ms(self.communication_s)}")
        if self.transfers or self.drained_s:
            bucket = self.most_exposed_bucket
            is_long = bucket is not None and self.exposed_by_bucket[bucket] >= least_s
            places = [f"bucket {bucket}"] if is_long else []
            if self.drained_s >= least_s:
                places.append(f"{format_ms(self.drained_s)} outside of buckets")
            where = f" ({', '.join(places)})" if places else ""
            parts.append(f"exposed {format_ms(self.exposed_s)}{where}")
        if (of_counts_s := max(rank.counts_s for rank in self.ranks)) >= least_s:
            parts.append(f"counts {format_ms(of_counts_s)}")
        if (clip_s := max(rank.clip_s for rank in self.ranks)) >= least_s:
            parts.append(f"clipping before it {format_ms(clip_s)}")
        rank, late_s = self.latest
        if late_s >= least_s:
            parts.append(f"rank {rank} late by {format_ms(late_s)}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Some steps of all ranks: the data of a `StepReport`.

    Args:
        model: The module's class.
        algorithm: Name of the algorithm.
        plan: The bucket plan that the steps were trained with.
        steps: In their order.
        clock_error_s: By how much at most the clocks of two ranks may differ.
        device: Type of the device, for example ``"cuda"``.
        explanation: ``model.explain()`` of this rank when the measurement ended.
    """

    model: str
    algorithm: str
    plan: BucketPlan
    steps: tuple[Step, ...]
    clock_error_s: float
    device: str
    explanation: Explanation | None = None

    @property
    def buckets(self) -> tuple[BucketSpec, ...]:
        """The buckets of the plan."""
        return self.plan.buckets

    @property
    def unknown_ends(self) -> str:
        """A sentence about the transfers whose end is not known; empty if there are none."""
        transfers = [each for step in self.steps for rank in step.ranks for each in rank.transfers]
        kinds = {each.kind for each in transfers if each.done is None}
        names = [name for kind, name in (("reduce", "reductions"), ("gather", "gathers")) if kind in kinds]
        if not names:
            return ""
        return f"Unknown times: nothing reported when {' and '.join(names)} ended. Waits for them were still measured."


def _transfers_over_ranks(ranks: Iterable[RankStep]) -> Iterator[TransferOverRanks]:
    by_key: dict[tuple[str, int, int], dict[int, Transfer]] = {}
    for rank in ranks:
        seen: dict[tuple[str, int], int] = {}
        for transfer in rank.transfers:
            name = (transfer.kind, transfer.bucket)
            seen[name] = seen.get(name, 0) + 1
            by_key.setdefault((*name, seen[name]), {})[rank.rank] = transfer
    free_at = float("-inf")
    for by_rank in by_key.values():
        first = next(iter(by_rank.values()))
        launched = max(transfer.launched for transfer in by_rank.values())
        ends = [transfer.done for transfer in by_rank.values() if transfer.done is not None]
        done = max(ends) if len(ends) == len(by_rank) else None
        yield TransferOverRanks(first.bucket, first.kind, by_rank, launched, max(launched, free_at), done)
        free_at = free_at if done is None else max(free_at, done)


def waits_of(transfers: Iterable[Transfer]) -> Iterator[tuple[float, float]]:
    """When somebody began to wait for each of them, and when that wait ended."""
    for transfer in transfers:
        if transfer.waited_from is not None and transfer.waited_until is not None:
            yield transfer.waited_from, transfer.waited_until


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Total length of the union of the intervals. An interval that ends before it begins is empty."""
    length, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > max(begin, until):
            length += end - max(begin, until)
            until = end
    return length


def format_ms(seconds: float | None, unit: str = " ms") -> str:
    """Milliseconds with two digits, or all of them: ``"41 ms"``, ``"0.52 ms"``, ``"1234 ms"``; ``"unknown"``."""
    if seconds is None:
        return "unknown"
    ms = 1e3 * seconds
    return f"{ms:.0f}{unit}" if abs(ms) >= 9.95 else f"{round(ms, 2):.2g}{unit}"
