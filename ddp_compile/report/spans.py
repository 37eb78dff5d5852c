"""The timeline of a step: what each rank did when. The page and the trace both draw it."""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from ddp_compile.report.steps import RankStep, Step, Transfer, TransferOverRanks

Lane = Literal["computation", "launch", "late", "wait", "queue", "transfer"]

#: Launches that take a smaller share of the step are part of the computation.
_SHORTEST_LAUNCH = 0.005


class Span(NamedTuple):
    """Something that one rank did, or a transfer of it."""

    #: ``"launch"`` is a launch that took long, since some algorithms wait inside it. ``"late"`` is a wait for a rank
    #: that has not launched the transfer, ``"wait"`` a wait for the transfer itself. ``"queue"`` is a transfer that was
    #: launched but cannot move yet, since a rank is late or the link is busy.
    lane: Lane
    begin: float  #: in seconds, as in `Step`
    end: float  #: likewise
    name: str  #: for example ``"backward"`` or ``"reduce bucket 5"``
    transfer: Transfer | None = None  #: the transfer that travels, or that is waited for


def spans_of(step: Step) -> dict[int, list[Span]]:
    """The spans of each rank of a step, in the order of the process group."""
    over_ranks = {(each.kind, each.bucket): each for each in step.transfers}
    found = {}
    for rank in step.ranks:
        busy: list[Span] = []
        moving: list[Span] = []
        for transfer in rank.transfers:
            everywhere = over_ranks[transfer.kind, transfer.bucket]
            busy += _busy(transfer, everywhere, _SHORTEST_LAUNCH * step.duration_s)
            if transfer.done is not None:
                begin, name = min(everywhere.began, transfer.done), _name(transfer)
                moving.append(Span("queue", transfer.launched, begin, name, transfer))
                moving.append(Span("transfer", begin, transfer.done, name, transfer))
        busy = [span for span in busy if span.end > span.begin]
        found[rank.rank] = [*_computations(rank, busy), *busy, *(span for span in moving if span.end > span.begin)]
    return found


def _busy(transfer: Transfer, everywhere: TransferOverRanks, shortest_launch: float) -> Iterator[Span]:
    """What kept the rank from computing."""
    name, since, until = _name(transfer), transfer.waited_from, transfer.waited_until
    if transfer.launch_returned - transfer.launched >= shortest_launch:
        yield Span("launch", transfer.launched, transfer.launch_returned, f"launch: {name}", transfer)
    if since is not None and until is not None:
        all_there = min(max(since, everywhere.launched), until)
        yield Span("late", since, all_there, f"wait for late ranks: {name}", transfer)
        yield Span("wait", all_there, until, f"wait: {name}", transfer)


def _computations(rank: RankStep, busy: Iterable[Span]) -> Iterator[Span]:
    """The rest of the step, cut where the backward begins."""
    parts = [("computation", rank.began, rank.ended)]
    if rank.backward_began is not None:
        parts = [("forward", rank.began, rank.backward_began), ("backward", rank.backward_began, rank.ended)]
    others = sorted((span.begin, span.end) for span in busy)
    for name, begin, end in parts:
        for other_begin, other_end in others:
            if begin < min(other_begin, end):
                yield Span("computation", begin, min(other_begin, end), name)
            begin = max(begin, other_end)
        if begin < end:
            yield Span("computation", begin, end, name)


def _name(transfer: Transfer) -> str:
    return f"{transfer.kind} bucket {transfer.bucket}"
