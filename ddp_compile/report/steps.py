"""What ``model.measure()`` returns: when each bucket was ready, launched, transferred and waited for, on every rank.

All times are in seconds since the first rank of the report began the step, on one clock; `StepReport.clock_error_s`
says how far the ranks' clocks may be apart.

Note [What a step is]
A step begins with its first forward and ends when its backward has reduced all gradients. The gathers of a sharded
optimizer that are launched after it travel while the next forward computes, so they belong to the next step, the one
that waits for them. They may have been launched before it began; such times are negative.

Note [Late ranks]
A collective moves nothing before its last rank has launched it. So the time from one rank's launch to the end is not
the transfer's: it contains the wait for the last rank. `Step.transfer_s` begins with the last launch, or with the end
of the transfer before it, as all share one link. What a rank waits before the last launch it waits for a late rank;
`Step.exposed_s` is what it waits after it. `Step.lateness_s` says which rank came late, and by how much.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median, median_low
from typing import TYPE_CHECKING, Any, Literal

from ddp_compile.report.explanation import Explanation
from ddp_compile.report.over_ranks import covered, transfers_over_ranks, waits_of

if TYPE_CHECKING:
    from ddp_compile.report.advice import Advice

Kind = Literal["reduce", "gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketInfo:
    """A bucket of the plan, as far as reports show it.

    Args:
        index: Its position in the plan.
        names: Fully qualified names of its parameters, in the order of the flat buffer.
        num_bytes: Bytes of its flat buffer.
        dtype: Name of the dtype, for example ``"float32"``.
    """

    index: int
    names: tuple[str, ...]
    num_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One transfer of one bucket as one rank saw it.

    Args:
        bucket: Index of the bucket in the plan.
        kind: ``"reduce"`` for gradients, ``"gather"`` for the parameters of a sharded optimizer.
        num_bytes: Bytes of the flat buffer; what travels depends on the algorithm.
        ready: When all gradients were in the flat buffer, or the optimizer had stepped all of the bucket.
        launched: When the transfer was handed to the process group.
        launch_returned: When the algorithm's launch returned. Long after ``launched`` if it waits inside.
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
        """What this rank waited for it."""
        if self.waited_from is None or self.waited_until is None:
            return 0.0
        return self.waited_until - self.waited_from


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step of one rank.

    Args:
        rank: Global rank.
        began: When its first forward began.
        backward_began: When the first gradient of the iteration arrived; None if that is not known.
        ended: When all gradients had been handed over.
        transfers: In the order of their launches.
        drained_s: Waited for the algorithm as a whole, not for one of the transfers.
    """

    rank: int
    began: float
    backward_began: float | None
    ended: float
    transfers: tuple[Transfer, ...]
    drained_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """What this rank waited for communication: for each transfer, and for the algorithm as a whole."""
        return sum(transfer.exposed_s for transfer in self.transfers) + self.drained_s

    @property
    def duration_s(self) -> float:
        """From its first forward to the last gradient."""
        return self.ended - self.began

    @property
    def launching_s(self) -> float:
        """What it spent launching: more than a moment if an algorithm waits inside its ``launch``."""
        return self._covered_s((t.launched, t.launch_returned) for t in self.transfers)

    @property
    def computation_s(self) -> float:
        """The rest: neither waited, nor launched."""
        launches = [(t.launched, t.launch_returned) for t in self.transfers]
        return max(0.0, self.duration_s - self._covered_s([*launches, *waits_of(self.transfers)]) - self.drained_s)

    def _covered_s(self, intervals: Iterable[tuple[float, float]]) -> float:
        """How much of the step is in any of these."""
        return covered((max(begin, self.began), min(end, self.ended)) for begin, end in intervals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of all ranks; of one rank if it comes from ``model.comm_stats()``, which knows of no late ranks.

    Args:
        number: Number of the iteration, the same on every rank; the first one is 1.
        ranks: In the order of the process group.
    """

    number: int
    ranks: tuple[RankStep, ...]

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
        """How long the link was busy, without waits for late ranks; None if some transfer's end is not known."""
        transfers = transfers_over_ranks(self.ranks)
        if any(each.done is None for each in transfers):
            return None
        return covered((each.began, each.done) for each in transfers if each.done is not None)

    @property
    def exposed_s(self) -> float:
        """The most that a rank waited for communication, without its waits for late ranks."""
        transfers = transfers_over_ranks(self.ranks)
        return max(
            sum(each.exposed_s(rank.rank) for each in transfers if rank.rank in each.by_rank) + rank.drained_s
            for rank in self.ranks
        )

    @property
    def drained_s(self) -> float:
        """The most that a rank waited for the algorithm as a whole."""
        return max(rank.drained_s for rank in self.ranks)

    @property
    def exposed_by_bucket(self) -> dict[int, float]:
        """For each bucket that was sent, the most that a rank waited for it, without waits for late ranks."""
        exposed: dict[int, float] = {}
        for each in transfers_over_ranks(self.ranks):
            most = max(each.exposed_s(rank) for rank in each.by_rank)
            exposed[each.bucket] = exposed.get(each.bucket, 0.0) + most
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
        transfers = transfers_over_ranks(self.ranks)
        times = [each.transfer_s for each in transfers if (each.bucket, each.kind) == (bucket, kind)]
        if not times:
            there = ", ".join(str(each.bucket) for each in transfers if each.kind == kind) or "none"
            raise IndexError(f"bucket={bucket!r} has no {kind} in step {self.number}; the buckets that have: {there}")
        return None if None in times else sum(time for time in times if time is not None)

    def lateness_s(self, rank: int) -> float:
        """The most by which a rank launched something later than the (lower) median of the ranks did.

        Args:
            rank: Global rank.

        Raises:
            ValueError: The step has no such rank.
        """
        self.of_rank(rank)
        late = [
            each.by_rank[rank].launched - median_low(other.launched for other in each.by_rank.values())
            for each in transfers_over_ranks(self.ranks)
            if rank in each.by_rank
        ]
        return max([0.0, *late])

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

    def scalars(self, prefix: str = "communication") -> dict[str, float]:
        """What a logger of scalars takes: times in milliseconds by name, such as ``communication/exposed_ms``.

        Args:
            prefix: What the names begin with, up to the slash.

        Returns:
            ``step_ms``, ``computation_ms``, ``launching_ms`` and ``exposed_ms``; ``transfers_ms``, which is
            `communication_s`, if it is known.
        """
        times = {
            "step": self.duration_s,
            "computation": self.computation_s,
            "launching": self.launching_s,
            "exposed": self.exposed_s,
            "transfers": self.communication_s,
        }
        return {f"{prefix}/{name}_ms": time * 1e3 for name, time in times.items() if time is not None}

    def __str__(self) -> str:
        from ddp_compile.report.text import format_step

        return format_step(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Some steps of all ranks, the same on every rank.

    Args:
        model: The model's class.
        algorithm: Name of the algorithm.
        plan_digest: Digest of the bucket plan.
        buckets: Of the plan, in its order.
        steps: In their order.
        clock_error_s: The most by which two ranks' clocks may be apart.
        device: Type of the device, for example ``"cuda"``.
        explanation: ``model.explain()`` of this rank when the measurement ended.
    """

    model: str
    algorithm: str
    plan_digest: str
    buckets: tuple[BucketInfo, ...]
    steps: Sequence[Step]
    clock_error_s: float
    device: str
    explanation: Explanation | None = None

    def to_json(self) -> str:
        """As text, for `from_json`."""
        measured = asdict(replace(self, explanation=None))
        explanation = None if self.explanation is None else self.explanation.to_json()
        return json.dumps({**measured, "explanation": explanation})

    @classmethod
    def from_json(cls, text: str) -> StepReport:
        """The report of a text that `to_json` has returned.

        Raises:
            ValueError: It is another text.
        """
        try:
            return _report_of(json.loads(text))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the JSON of a StepReport: {error!r}; pass what to_json() has returned") from error

    def __str__(self) -> str:
        from ddp_compile.report.text import format_report

        return format_report(self)

    # Imported where they are used, as they show what is defined here.

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, in the format of its suffix; replaces a file that is there.

        Args:
            path: ``.html`` is one page that needs nothing else, ``.perfetto-trace`` is for ui.perfetto.dev, ``.json``
                for `from_json`, ``.png`` for `plot`. The folder has to exist.

        Raises:
            ValueError: The suffix is another one.
            FileNotFoundError: There is no such folder.
            ImportError: The format needs matplotlib or perfetto, which is not installed.
        """
        from ddp_compile.report.files import save_report

        save_report(self, path)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the step of median length with matplotlib, one lane for each rank.

        Args:
            path: Ends with ``.png``, in a folder that exists.

        Raises:
            ValueError: It has another suffix.
            FileNotFoundError: There is no such folder.
            ImportError: matplotlib is not installed.
        """
        from ddp_compile.report.files import plot_report

        plot_report(self, path)

    def advice(self) -> tuple[Advice, ...]:
        """What these steps say that one may act on, the costliest first; nothing from fewer than five steps."""
        from ddp_compile.report.advice import advise

        return advise(self)


def _report_of(fields: dict[str, Any]) -> StepReport:
    buckets = tuple(BucketInfo(**{**bucket, "names": tuple(bucket["names"])}) for bucket in fields["buckets"])
    steps = [_step_of(step) for step in fields["steps"]]
    explanation = fields["explanation"] and Explanation.from_json(fields["explanation"])
    return StepReport(**{**fields, "buckets": buckets, "steps": steps, "explanation": explanation})


def _step_of(fields: dict[str, Any]) -> Step:
    ranks = tuple(
        RankStep(**{**rank, "transfers": tuple(Transfer(**transfer) for transfer in rank["transfers"])})
        for rank in fields["ranks"]
    )
    return Step(number=fields["number"], ranks=ranks)
