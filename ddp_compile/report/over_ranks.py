"""One step's transfers over all ranks: see Note [Late ranks] of `ddp_compile.report.steps`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ddp_compile.report.steps import Kind, RankStep, Transfer


class TransferOverRanks(NamedTuple):
    """One transfer on all ranks that have it."""

    bucket: int
    kind: Kind
    by_rank: Mapping[int, Transfer]
    launched: float  #: by the last rank
    began: float  #: when the link was free after that
    done: float | None

    @property
    def transfer_s(self) -> float | None:
        return None if self.done is None else max(0.0, self.done - self.began)

    def exposed_s(self, rank: int) -> float:
        """What a rank waited after the last rank had launched it."""
        return covered((max(begin, self.launched), end) for begin, end in waits_of([self.by_rank[rank]]))


def transfers_over_ranks(ranks: Iterable[RankStep]) -> list[TransferOverRanks]:
    """The transfers of a step in the order of their launches, which is the same on every rank."""
    by_key: dict[tuple[str, int, int], dict[int, Transfer]] = {}
    for rank in ranks:
        seen: dict[tuple[str, int], int] = {}
        for transfer in rank.transfers:
            name = (transfer.kind, transfer.bucket)
            seen[name] = seen.get(name, 0) + 1
            by_key.setdefault((*name, seen[name]), {})[rank.rank] = transfer
    transfers = []
    free_at = float("-inf")
    for by_rank in by_key.values():
        first = next(iter(by_rank.values()))
        launched = max(transfer.launched for transfer in by_rank.values())
        ends = [transfer.done for transfer in by_rank.values() if transfer.done is not None]
        done = max(ends) if len(ends) == len(by_rank) else None
        transfers.append(TransferOverRanks(first.bucket, first.kind, by_rank, launched, max(launched, free_at), done))
        free_at = free_at if done is None else max(free_at, done)
    return transfers


def waits_of(transfers: Iterable[Transfer]) -> Iterator[tuple[float, float]]:
    """From when until when somebody waited for each of them."""
    for transfer in transfers:
        if transfer.waited_from is not None and transfer.waited_until is not None:
            yield transfer.waited_from, transfer.waited_until


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of what is in at least one of these intervals; those that end before they begin are empty."""
    length, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > max(begin, until):
            length += end - max(begin, until)
            until = end
    return length
