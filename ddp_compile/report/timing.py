"""When transfers moved data, how late ranks were, and what of it was exposed."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from ddp_compile.report.steps import Kind, Step, Transfer


class Times(NamedTuple):
    """One transfer over all ranks.

    Args:
        ready: When its last rank was ready.
        launched: When its last rank launched it.
        begin: When data began to move: with the last launch, or with the end of the transfer before it.
        end: When the result was complete on every rank.
        exposed_s: What every rank waited while data moved: the least of all ranks.
    """

    ready: float
    launched: float
    begin: float
    end: float
    exposed_s: float


def transfer_times(step: Step) -> dict[tuple[Kind, int], Times]:
    """The transfers of a step by kind and bucket, in launch order; without those whose end is not known."""
    by_key: dict[tuple[Kind, int], list[Transfer]] = {}
    for rank in step.ranks:
        for transfer in rank.transfers:
            by_key.setdefault((transfer.kind, transfer.bucket), []).append(transfer)
    found, free = {}, float("-inf")
    for key, seen in by_key.items():
        ends = [transfer.done for transfer in seen if transfer.done is not None]
        if len(ends) < len(step.ranks):
            continue
        launched, end = max(transfer.launched for transfer in seen), max(ends)
        begin = min(max(launched, free), end)
        free = max(free, end)
        exposed = min(
            max(0.0, (t.waited_until or 0.0) - max(begin, t.waited_from)) if t.waited_from is not None else 0.0
            for t in seen
        )
        found[key] = Times(max(transfer.ready for transfer in seen), launched, begin, end, exposed)
    return found


def lateness_s(step: Step) -> dict[int, float]:
    """By how much each rank launched the last reduction later than the (lower) median rank; zero if it did not."""
    launches = {}
    for rank in step.ranks:
        reduces = [transfer.launched for transfer in rank.transfers if transfer.kind == "reduce"]
        if reduces:
            launches[rank.rank] = reduces[-1]
    middle = sorted(launches.values())[(len(launches) - 1) // 2] if launches else 0.0
    return {rank: max(0.0, launched - middle) for rank, launched in launches.items()}


def step_s(step: Step) -> float:
    return max(rank.ended for rank in step.ranks) - min(rank.began for rank in step.ranks)


def median_step(steps: list[Step]) -> Step:
    """The step of median length."""
    return sorted(steps, key=step_s)[(len(steps) - 1) // 2]


def median_times(steps: list[Step]) -> dict[tuple[Kind, int], Times]:
    """Over the steps, of each transfer that is in all of them."""
    all_times = [transfer_times(step) for step in steps]
    return {
        key: Times(*map(median, zip(*(times[key] for times in all_times), strict=True)))
        for key in all_times[0]
        if all(key in times for times in all_times)
    }
