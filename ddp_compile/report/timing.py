"""Medians over measured steps."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from ddp_compile.report.steps import Kind, Step, TransferOverRanks


class Times(NamedTuple):
    """One transfer over all ranks."""

    ready: float  #: when its last rank was ready
    launched: float  #: when its last rank launched it
    began: float  #: when data began to move: with the last launch, or with the end of the transfer before it
    transfer_s: float | None  #: from then until the result was complete on every rank; None if that is not known
    exposed_s: float  #: the longest that a rank waited for it, without its wait for late ranks


def median_step(steps: Sequence[Step]) -> Step:
    """The step of median length."""
    return sorted(steps, key=lambda step: step.duration_s)[(len(steps) - 1) // 2]


def median_totals(steps: Sequence[Step]) -> dict[str, float | None]:
    """Medians of `Step.totals`, each over the steps in which it is known."""
    columns = {name: [step.totals[name] for step in steps] for name in steps[0].totals}
    known = {name: [time for time in times if time is not None] for name, times in columns.items()}
    return {name: median(times) if times else None for name, times in known.items()}


def median_times(steps: Sequence[Step]) -> dict[tuple[Kind, int], Times]:
    """Medians over the steps, by kind and bucket in launch order, of each transfer that is in all of them.

    Of a bucket that was launched again, the last transfer counts.
    """
    every = [{(each.kind, each.bucket): each for each in step.transfers} for step in steps]
    keys = [key for key in every[0] if all(key in transfers for transfers in every)]
    return {key: _median([transfers[key] for transfers in every]) for key in keys}


def _median(transfers: Sequence[TransferOverRanks]) -> Times:
    known = [each.transfer_s for each in transfers if each.transfer_s is not None]
    return Times(
        ready=median(max(own.ready for own in each.by_rank.values()) for each in transfers),
        launched=median(each.launched for each in transfers),
        began=median(each.began for each in transfers),
        transfer_s=median(known) if len(known) == len(transfers) else None,
        exposed_s=median(max(each.exposed_s(rank) for rank in each.by_rank) for each in transfers),
    )
