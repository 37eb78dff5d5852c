"""One step of one rank as stretches of time, which the page, the chart and the trace draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from ddp_compile.report.steps import RankStep, Step, Transfer
from ddp_compile.report.timing import transfer_times

Lane = Literal["computation", "wait", "queue", "transfer"]


class Span(NamedTuple):
    """A stretch of time on one rank.

    Args:
        lane: ``"queue"`` is a transfer that was launched and cannot move yet: a rank is late, or the link is busy.
        begin: In seconds, as in `Step`.
        end: Likewise.
        name: What happens, for example ``"backward"`` or ``"reduce bucket 5"``.
        transfer: Which one travels, or is waited for.
    """

    lane: Lane
    begin: float
    end: float
    name: str
    transfer: Transfer | None = None


def spans_of(step: Step) -> dict[int, list[Span]]:
    """The spans of each rank of a step, in the order of the process group."""
    begins = {key: times.began for key, times in transfer_times(step).items()}
    found = {}
    for rank in step.ranks:
        spans = [*_waits(rank)]
        for transfer in rank.transfers:
            begin, done = begins.get((transfer.kind, transfer.bucket)), transfer.done
            if begin is not None and done is not None:
                begin = min(begin, done)
                spans.append(Span("queue", transfer.launched, begin, _name(transfer), transfer))
                spans.append(Span("transfer", begin, done, _name(transfer), transfer))
        found[rank.rank] = [*_computations(rank), *(span for span in spans if span.end > span.begin)]
    return found


def _waits(rank: RankStep) -> Iterator[Span]:
    for transfer in rank.transfers:
        if transfer.waited_from is not None and transfer.waited_until is not None:
            yield Span("wait", transfer.waited_from, transfer.waited_until, f"wait for {_name(transfer)}", transfer)


def _computations(rank: RankStep) -> Iterator[Span]:
    """Whatever is no wait, cut where the backward begins."""
    middle = rank.backward_began
    parts = [("computation", rank.began, rank.ended)]
    if middle is not None:
        parts = [("forward", rank.began, middle), ("backward", middle, rank.ended)]
    waits = sorted((span.begin, span.end) for span in _waits(rank))
    for name, begin, end in parts:
        for wait_begin, wait_end in waits:
            if begin < min(wait_begin, end):
                yield Span("computation", begin, min(wait_begin, end), name)
            begin = max(begin, wait_end)
        if begin < end:
            yield Span("computation", begin, end, name)


def _name(transfer: Transfer) -> str:
    return f"{transfer.kind} bucket {transfer.bucket}"
