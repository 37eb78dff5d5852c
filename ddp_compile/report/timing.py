"""Transfers over all ranks, and their medians over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from ddp_compile.report.steps import Kind, Step


class Times(NamedTuple):
    """One transfer over all ranks.

    Args:
        ready: When its last rank was ready.
        launched: When its last rank launched it.
        began: When data began to move: with the last launch, or with the end of the transfer before it.
        done: When the result was complete on every rank.
        exposed_s: The most that a rank waited for it, without its wait for late ranks.
        least_exposed_s: The least, which no rank was spared.
    """

    ready: float
    launched: float
    began: float
    done: float
    exposed_s: float
    least_exposed_s: float

    @property
    def transfer_s(self) -> float:
        return self.done - self.began


def transfer_times(step: Step) -> dict[tuple[Kind, int], Times]:
    """The transfers of a step by kind and bucket, in launch order; without those whose end is not known.

    Of a bucket that was launched again, the last transfer.
    """
    found = {}
    for each in step._transfers():
        if each.done is not None:
            exposed = [each.exposed_s(rank) for rank in each.by_rank]
            ready = max(transfer.ready for transfer in each.by_rank.values())
            began = min(each.began, each.done)
            found[each.kind, each.bucket] = Times(ready, each.launched, began, each.done, max(exposed), min(exposed))
    return found


def median_step(steps: Sequence[Step]) -> Step:
    """The step of median length."""
    return sorted(steps, key=lambda step: step.duration_s)[(len(steps) - 1) // 2]


def median_times(steps: Sequence[Step]) -> dict[tuple[Kind, int], Times]:
    """Medians over the steps, of each transfer that is in all of them."""
    every = [transfer_times(step) for step in steps]
    return {
        key: Times(*map(median, zip(*(times[key] for times in every), strict=True)))
        for key in every[0]
        if all(key in times for times in every)
    }
