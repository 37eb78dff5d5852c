"""Advice from measured steps. It says nothing that the measurements do not show."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal, get_args

from ddp_compile.errors import format_ranks, number_of, shorten_names
from ddp_compile.report.steps import LEAST_SHARE, Kind, MeasuredSteps, format_ms
from ddp_compile.report.timing import Times, median_times

#: Fewer steps give no advice.
FEWEST_STEPS = 5
#: A rank is called late if it is late in this share of the steps.
_OFTEN = 0.8
#: A bucket that is exposed for this share of its transfer counts as not hidden at all.
_ALL = 0.9
#: Advice of each kind, the costliest first.
_MOST = 3
_NOUN = {"reduce": "reduction", "gather": "gather"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One piece of advice.

    Args:
        kind: ``"reduce"`` or ``"gather"`` for exposed transfers, ``"late"`` for late ranks.
        bucket: Index of the bucket; None if it is about several, or about ranks.
        ranks: Global ranks that are nearly always late; empty if none is, or if it is about buckets.
        seconds: A median: the longest that a rank waits, as in the page's table, or by how much ranks are late.
        text: A sentence without its period.
    """

    kind: Literal["reduce", "gather", "late"]
    bucket: int | None
    ranks: tuple[int, ...]
    seconds: float
    text: str


def advise(report: MeasuredSteps) -> tuple[Advice, ...]:
    """Advice from measured steps, the costliest first; none from fewer than five steps."""
    if len(report.steps) < FEWEST_STEPS:
        return ()
    least_s = least_seconds(report)
    found = [*_exposed(report, least_s), *_late(report, least_s)]
    found.sort(key=lambda advice: -advice.seconds)
    return tuple(
        advice for i, advice in enumerate(found) if sum(other.kind == advice.kind for other in found[:i]) < _MOST
    )


def least_seconds(report: MeasuredSteps) -> float:
    """Threshold below which no advice is given: 1 % of the median step, or the error of the clocks."""
    return max(LEAST_SHARE * median(step.duration_s for step in report.steps), report.clock_error_s)


def _exposed(report: MeasuredSteps, least_s: float) -> Iterator[Advice]:
    times = median_times(report.steps)
    for kind in get_args(Kind):
        own = {bucket: each for (its_kind, bucket), each in times.items() if its_kind == kind}
        costly = [bucket for bucket, each in own.items() if each.exposed_s >= least_s]
        total_s = sum(each.exposed_s for each in own.values())
        for bucket in costly:
            exposed_s = own[bucket].exposed_s
            text = f"the forward waits {format_ms(exposed_s)} for the gather of bucket {bucket} in the median"
            if kind == "reduce":
                text = _reduced(report, bucket, own, least_s)
            yield Advice(kind=kind, bucket=bucket, ranks=(), seconds=exposed_s, text=text)
        if not costly and total_s >= least_s:
            num = sum(each.exposed_s > 0 for each in own.values())
            text = f"{number_of(num, _NOUN[kind])} {'is' if num == 1 else 'are'} exposed, each for less"
            text += f" than {format_ms(least_s)} and together for {format_ms(total_s)} in the median"
            yield Advice(kind=kind, bucket=None, ranks=(), seconds=total_s, text=text)


def _reduced(report: MeasuredSteps, bucket: int, times: Mapping[int, Times], least_s: float) -> str:
    names = shorten_names([shorten(gradient.fqn) for gradient in report.buckets[bucket].gradients])
    exposed = format_ms(times[bucket].exposed_s)
    text = f"bucket {bucket} ({names}) is exposed for {exposed} in the median"
    reason = _reason(report, bucket, times, least_s)
    return f"{text}: {reason}" if reason else text


def _reason(report: MeasuredSteps, bucket: int, times: Mapping[int, Times], least_s: float) -> str:
    """Why a bucket is exposed; empty if the times do not show it."""
    own, is_last = times[bucket], bucket == list(times)[-1]
    queued_s = own.began - own.launched
    if queued_s >= least_s:
        return f"the transfers before it end {format_ms(queued_s)} after its launch"
    if is_last and own.transfer_s is not None and own.exposed_s >= _ALL * own.transfer_s:
        return "it is launched last and nothing is left to hide it"
    launches = report.explanation.launches if report.explanation else ()
    launch = next((each for each in launches if each.bucket == bucket), None)
    if is_last or launch is None or launch.is_early:
        return ""
    return f"it is not launched while the backward computes: {launch.when}"


def _late(report: MeasuredSteps, least_s: float) -> Iterator[Advice]:
    """Ranks that are nearly always late. If most ranks seem to be, it only varies which rank is late."""
    by_rank: dict[int, list[float]] = {}
    for step in report.steps:
        late = {rank.rank: step.lateness_s(rank.rank) for rank in step.ranks}
        bound = max(least_s, max(late.values()) / 2)
        for rank, late_s in late.items():
            if late_s >= bound:
                by_rank.setdefault(rank, []).append(late_s)
    often = {rank: late for rank, late in by_rank.items() if len(late) >= _OFTEN * len(report.steps)}
    if not 0 < len(often) <= len(report.steps[0].ranks) / 2:
        latest_s = median(max(step.lateness_s(rank.rank) for rank in step.ranks) for step in report.steps)
        if latest_s >= least_s:
            text = f"the last rank arrives {format_ms(latest_s)} late in the median, and it is not always the same rank"
            yield Advice(kind="late", bucket=None, ranks=(), seconds=latest_s, text=text)
        return
    ranks = tuple(sorted(often))
    share = min(map(len, often.values())) / len(report.steps)
    late_s = min(map(median, often.values()))
    percent, late_by = f"{100 * share:.0f} %", format_ms(late_s)
    if len(ranks) == 1:
        text = f"rank {ranks[0]} arrives late in {percent} of steps, by {late_by} in the median"
    else:
        text = f"ranks {format_ranks(ranks)} arrive late in at least {percent} of steps, by at least {late_by}"
    yield Advice(kind="late", bucket=None, ranks=ranks, seconds=late_s, text=text)


def shorten(name: str, longest: int = 48) -> str:
    """A name in at most so many characters: its two ends."""
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"
