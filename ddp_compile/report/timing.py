"""Transfers over all ranks, and their medians over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from ddp_compile.report.over_ranks import transfers_over_ranks
from ddp_compile.report.steps import Kind, Step


class Times(NamedTuple):
    """One transfer over all ranks.

    Args:
        ready: When its last rank was ready.
        launched: When its last rank launched it.
        began: When data began to move: with the last launch, or with the end of the transfer before it.
        transfer_s: From then until the result was complete on every rank; None if that is not known.
        exposed_s: The most that a rank waited for it, without its wait for late ranks.
        least_exposed_s: The least, which no rank was spared.
    """

    ready: float
    launched: float
    began: float
    transfer_s: float | None
    exposed_s: float
    least_exposed_s: float


def transfer_times(step: Step) -> dict[tuple[Kind, int], Times]:
    """The transfers of a step by kind and bucket, in launch order; the last one of a bucket that was launched again."""
    found = {}
    for each in transfers_over_ranks(step.ranks):
        exposed = [each.exposed_s(rank) for rank in each.by_rank]
        ready = max(transfer.ready for transfer in each.by_rank.values())
        times = Times(ready, each.launched, each.began, each.transfer_s, max(exposed), min(exposed))
        found[each.kind, each.bucket] = times
    return found


def median_step(steps: Sequence[Step]) -> Step:
    """The step of median length."""
    return sorted(steps, key=lambda step: step.duration_s)[(len(steps) - 1) // 2]


def median_times(steps: Sequence[Step]) -> dict[tuple[Kind, int], Times]:
    """Medians over the steps, of each transfer that is in all of them."""
    every = [transfer_times(step) for step in steps]
    return {key: _median([times[key] for times in every]) for key in every[0] if all(key in times for times in every)}


def _median(times: Sequence[Times]) -> Times:
    known = [each.transfer_s for each in times if each.transfer_s is not None]
    return Times(
        ready=median(each.ready for each in times),
        launched=median(each.launched for each in times),
        began=median(each.began for each in times),
        transfer_s=median(known) if len(known) == len(times) else None,
        exposed_s=median(each.exposed_s for each in times),
        least_exposed_s=median(each.least_exposed_s for each in times),
    )
