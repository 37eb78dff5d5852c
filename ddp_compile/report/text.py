"""Measured steps as text: one line for a log, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ddp_compile.errors import number_of
from ddp_compile.report.steps import Step, StepReport

#: What takes less than this share of a step is left out of its line.
_LEAST_SHARE = 0.01
_MOST_ROWS = 20


def format_step(step: Step) -> str:
    """One line: ``"compute 61 ms, communication 40 ms, exposed 7 ms (bucket 5), rank 3 late by 12 ms"``.

    Launches, and ranks that are late, are named if they take at least 1 % of the step.
    """
    least_s = _LEAST_SHARE * step.duration_s
    parts = [f"compute {_ms(step.computation_s)}"]
    if step.launching_s >= least_s:
        parts.append(f"launching {_ms(step.launching_s)}")
    if any(rank.transfers for rank in step.ranks):
        parts.append(f"communication {_ms(step.communication_s)}")
    if any(rank.transfers or rank.drained_s for rank in step.ranks):
        parts.append(f"exposed {_ms(step.exposed_s)}{_where(step, least_s)}")
    rank, late_s = _latest(step)
    if late_s >= least_s:
        parts.append(f"rank {rank} late by {_ms(late_s)}")
    return ", ".join(parts)


def _where(step: Step, least_s: float) -> str:
    bucket = step.most_exposed_bucket
    places = [] if bucket is None or step.exposed_by_bucket[bucket] < least_s else [f"bucket {bucket}"]
    if step.drained_s >= least_s:
        places.append(f"{_ms(step.drained_s)} outside of buckets")
    return f" ({', '.join(places)})" if places else ""


def _latest(step: Step) -> tuple[int, float]:
    return max(((rank.rank, step.lateness_s(rank.rank)) for rank in step.ranks), key=lambda found: found[1])


def format_report(report: StepReport) -> str:
    """A table of the last 20 steps at most, with the medians of all steps, in ms."""
    shown = report.steps[-_MOST_ROWS:]
    heading = (
        f"{report.model}, {report.algorithm}: {number_of(len(report.steps), 'step')} of"
        f" {number_of(len(report.steps[0].ranks), 'rank')}, {number_of(len(report.buckets), 'bucket')}, plan"
        f" {report.plan_digest}; times in ms, clocks within {report.clock_error_s * 1e3:.3f} ms"
    )
    header = ["step", "all", "compute", "launching", "communication", "exposed", "most in", "late"]
    rows = [_row(step) for step in shown]
    table = _align([header, *rows, _medians(report.steps)])
    return "\n".join([heading, *table, *format_unknown(report.steps)])


def format_unknown(steps: Sequence[Step]) -> list[str]:
    """A sentence about the transfers whose end is not known, if there are any."""
    kinds = {each.kind for step in steps for rank in step.ranks for each in rank.transfers if each.done is None}
    if not kinds:
        return []
    what = " and ".join(word for kind, word in (("reduce", "reductions"), ("gather", "gathers")) if kind in kinds)
    return [f"Where a time is unknown, nothing says when {what} were over; waits for them are measured all the same."]


def _row(step: Step) -> list[str]:
    rank, late_s = _latest(step)
    bucket = step.most_exposed_bucket
    return [
        str(step.number),
        *map(_number, _times(step)),
        "" if bucket is None else f"bucket {bucket}",
        f"{_number(late_s)} (rank {rank})" if late_s >= _LEAST_SHARE * step.duration_s else "",
    ]


def _times(step: Step) -> list[float | None]:
    return [step.duration_s, step.computation_s, step.launching_s, step.communication_s, step.exposed_s]


def _medians(steps: Sequence[Step]) -> list[str]:
    columns = zip(*map(_times, steps), strict=True)
    known = [[time for time in column if time is not None] for column in columns]
    return ["median", *(_number(median(times) if times else None) for times in known), "", ""]


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{_number(seconds)} ms"


def _number(seconds: float | None) -> str:
    """In ms: two digits, or as many as there are before the point."""
    if seconds is None:
        return "unknown"
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f}" if milliseconds >= 9.95 else f"{milliseconds:.1f}".removesuffix(".0")
