"""What the measured steps say that a user may act on. Whatever the measurements do not show is not said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal, get_args

from ddp_compile.errors import format_ranks, number_of, shorten_names
from ddp_compile.report.replay import Better, Sent, best_split
from ddp_compile.report.steps import Kind, StepReport
from ddp_compile.report.timeline import format_ms
from ddp_compile.report.timing import Times, median_times

#: With fewer steps nothing is said.
FEWEST_STEPS = 5
#: Nor about a smaller share of the step.
_LEAST_SHARE = 0.01
#: A rank is called late if it is in this share of the steps.
_OFTEN = 0.8
#: Of a bucket that is exposed for this share of its transfer, nothing is hidden.
_ALL = 0.9
#: Sentences of each kind, those with most seconds.
_MOST = 3
_NOUN = {"reduce": "reduction", "gather": "gather"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One sentence, and what it is about.

    Args:
        kind: ``"reduce"`` or ``"gather"`` for transfers that are exposed, ``"late"`` for ranks that are.
        bucket: Index of the bucket; None if it is about several, or about ranks.
        ranks: Global ranks that are nearly always late; empty if none is, or if it is about buckets.
        seconds: What every rank waits, or by how much the ranks are late when they are; a median.
        text: The sentence, without a period.
    """

    kind: Literal["reduce", "gather", "late"]
    bucket: int | None
    ranks: tuple[int, ...]
    seconds: float
    text: str


def advise(report: StepReport) -> tuple[Advice, ...]:
    """Advice from a report, the costliest first; none from fewer than five steps.

    Args:
        report: What was measured.
    """
    if len(report.steps) < FEWEST_STEPS:
        return ()
    least_s = least_seconds(report)
    found = [*_exposed(report, least_s), *_late(report, least_s)]
    found.sort(key=lambda advice: -advice.seconds)
    return tuple(
        advice for i, advice in enumerate(found) if sum(other.kind == advice.kind for other in found[:i]) < _MOST
    )


def least_seconds(report: StepReport) -> float:
    """Below this nothing is said: a hundredth of the median step, or what the clocks may be apart."""
    return max(_LEAST_SHARE * median(step.duration_s for step in report.steps), report.clock_error_s)


def _exposed(report: StepReport, least_s: float) -> Iterator[Advice]:
    times = median_times(report.steps)
    for kind in get_args(Kind):
        own = {bucket: each for (its_kind, bucket), each in times.items() if its_kind == kind}
        costly = [bucket for bucket, each in own.items() if each.least_exposed_s >= least_s]
        total_s = sum(each.least_exposed_s for each in own.values())
        for bucket in costly:
            text = _gathered(bucket, own) if kind == "gather" else _reduced(report, bucket, own, least_s)
            yield Advice(kind=kind, bucket=bucket, ranks=(), seconds=own[bucket].least_exposed_s, text=text)
        if not costly and total_s >= least_s:
            num = number_of(sum(each.least_exposed_s > 0 for each in own.values()), _NOUN[kind])
            text = f"{num} are exposed for {format_ms(total_s)} together on every rank in the median"
            text += f", each for less than {format_ms(least_s)}"
            yield Advice(kind=kind, bucket=None, ranks=(), seconds=total_s, text=text)


def _gathered(bucket: int, times: Mapping[int, Times]) -> str:
    waited = format_ms(times[bucket].least_exposed_s)
    return f"the forward waits {waited} for the gather of bucket {bucket} on every rank in the median"


def _reduced(report: StepReport, bucket: int, times: Mapping[int, Times], least_s: float) -> str:
    names = shorten_names([shorten(name) for name in report.buckets[bucket].names])
    exposed = format_ms(times[bucket].least_exposed_s)
    text = f"bucket {bucket} ({names}) is exposed for {exposed} on every rank in the median"
    is_last = bucket == list(times)[-1]
    reason = _reason(times[bucket], is_last=is_last, least_s=least_s)
    launch = report.explanation and next((each for each in report.explanation.launches if each.bucket == bucket), None)
    if not reason and not is_last and launch and not launch.is_early:
        reason = f"it is not launched while the backward computes: {launch.when}"
    text += f": {reason}" if reason else ""
    better = _smaller(report, times, bucket)
    if better is not None and better.hidden_s >= least_s:
        text += (
            f"; {number_of(better.pieces, 'bucket')} in its place would hide about {format_ms(better.hidden_s)}, "
            "if its gradients become ready at an even pace"
        )
    return text


def _reason(own: Times, *, is_last: bool, least_s: float) -> str:
    """What the times show; empty if they show nothing that must be the reason."""
    queued_s = own.began - own.launched
    if queued_s >= least_s:
        return f"the transfers before it end {format_ms(queued_s)} after its launch"
    if is_last and own.transfer_s is not None and own.least_exposed_s >= _ALL * own.transfer_s:
        return "it is launched last and nothing is left to hide it"
    return ""


def _smaller(report: StepReport, reduces: Mapping[int, Times], bucket: int) -> Better | None:
    """What a split of a bucket would hide; None if the measurements do not tell."""
    began = [rank.backward_began for step in report.steps for rank in step.ranks]
    known = [each for each in began if each is not None]
    # Where it is not known, pieces of the first bucket are ready with the whole, and nothing is gained.
    begun = median(known) if len(known) == len(began) else next(iter(reduces.values())).ready
    sent, end = [], 0.0
    for index, own in reduces.items():
        if own.transfer_s is None:
            return None
        end = max(end, own.began + own.transfer_s)
        sent.append(Sent(report.buckets[index].num_bytes, begun, own.ready, own.transfer_s))
        begun = max(begun, own.ready)
    exposed_s = sum(own.least_exposed_s for own in reduces.values())
    most = len(report.buckets[bucket].names)
    return best_split(sent, list(reduces).index(bucket), most, end - exposed_s, exposed_s)


def _late(report: StepReport, least_s: float) -> Iterator[Advice]:
    """Ranks that are nearly always late. If that seems to be so of most ranks, they only vary."""
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
            text = f"the last rank arrives {format_ms(latest_s)} late in the median, and it is not always the same one"
            yield Advice(kind="late", bucket=None, ranks=(), seconds=latest_s, text=text)
        return
    ranks = tuple(sorted(often))
    share = min(map(len, often.values())) / len(report.steps)
    late_s = min(map(median, often.values()))
    one = len(ranks) == 1
    text = (
        f"rank{'' if one else 's'} {format_ranks(ranks)} arrive{'s' if one else ''} late in "
        f"{'' if one else 'at least '}{100 * share:.0f} % of steps, by {format_ms(late_s)} in the median"
        f"{'' if one else ' or more'}"
    )
    yield Advice(kind="late", bucket=None, ranks=ranks, seconds=late_s, text=text)


def shorten(name: str, most: int = 48) -> str:
    """A name in at most so many characters: its two ends."""
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[:half]}…{name[-half:]}"
