"""Which rows of a run a chart compares, and in which order."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ddp_compile.bench.charts.data_files import SummaryRow
from ddp_compile.bench.implementations import COMMUNICATION, LOCAL, OURS_PREFIX
from ddp_compile.bench.implementations import PEERS as KNOWN_PEERS

PEERS = tuple(KNOWN_PEERS)
_OURS = ("auto", "forward", "backward", "none", "bfloat16", "float16", "byte-grad")
_MODES = ("default", "reduce-overhead", "max-autotune")
_UNSHAPED = ("loopback", "none")


class Case(NamedTuple):
    """An implementation with its settings, on a link."""

    implementation: str
    mode: str
    bucket_cap_mb: float | None
    link: str


def implementation_order(name: str) -> tuple[int, int, str]:
    """Sort key: ours, a user's own, peers, and then those without data parallelism."""
    if name.startswith(OURS_PREFIX):
        return 0, _position(name.removeprefix(OURS_PREFIX), _OURS), name
    if name in (LOCAL, COMMUNICATION):
        return 3, 0, name
    return 2 if name in PEERS else 1, _position(name, PEERS), name


def mode_order(mode: str) -> tuple[int, str]:
    """Sort key: the modes of ``torch.compile``, by how much they optimize."""
    return _position(mode, _MODES), mode


def link_order(link: str) -> tuple[int, float, str]:
    """Sort key: slowest link first, those without a rate last."""
    rate = gbit_of(link)
    return (1, _position(link, _UNSHAPED), link) if rate is None else (0, rate, link)


def link_name(link: str) -> str:
    """A link's name in words."""
    return "not shaped" if link == "none" else link


def gbit_of(link: str) -> float | None:
    """The rate in a link's name, such as 0.5 in "500mbit"; None if it has none."""
    found = re.search(r"(?i)(\d+(?:\.\d+)?)\s*([kmg])bit", link)
    return float(found[1]) * {"k": 1e-6, "m": 1e-3, "g": 1.0}[found[2].lower()] if found else None


def comparable_rows(rows: Iterable[SummaryRow]) -> list[SummaryRow]:
    """Rows that one chart may compare: the fewest micro-batches, and one mode of each implementation.

    The mode is "default", or the first other one if an implementation was not run in it. Implementations that are not
    data-parallel are left out.
    """
    rows = with_fewest_micro_batches(row for row in rows if row.implementation not in (LOCAL, COMMUNICATION))
    modes = headline_modes((row.implementation, row.mode) for row in rows)
    return [row for row in rows if row.mode == modes[row.implementation]]


def with_fewest_micro_batches(rows: Iterable[SummaryRow]) -> list[SummaryRow]:
    """Rows with the smallest ``no_sync_every`` that any step was measured with."""
    rows = list(rows)
    fewest = min((row.no_sync_every or 1 for row in rows if is_measured(row)), default=1)
    return [row for row in rows if (row.no_sync_every or 1) == fewest]


def headline_modes(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The mode to show of each implementation, from pairs of implementation and mode."""
    found: dict[str, str] = {}
    for implementation, mode in pairs:
        found[implementation] = min(found.get(implementation, mode), mode, key=mode_order)
    return found


def is_measured(row: SummaryRow) -> bool:
    return row.status == "ok" and row.step_ms is not None


def fastest(rows: Iterable[SummaryRow]) -> SummaryRow | None:
    """The row of the shortest step; None if no step was measured."""
    return min(
        (row for row in rows if is_measured(row)),
        key=lambda row: math.inf if row.step_ms is None else row.step_ms,
        default=None,
    )


def choose_cases(cases: Sequence[Case], summary: Iterable[SummaryRow]) -> list[Case]:
    """One case of each implementation, all on one link, ordered by `implementation_order`.

    The link is the slowest of those with the most implementations, since waiting is most visible there. Of several
    bucket capacities, it takes the one with the fastest step, or the one closest to 25 MiB if no step was measured.
    """
    by_link = {case.link: {other.implementation for other in cases if other.link == case.link} for case in cases}
    if not by_link:
        return []
    link = min(by_link, key=lambda link: (-len(by_link[link]), link_order(link)))
    cases = [case for case in cases if case.link == link]
    modes = headline_modes((case.implementation, case.mode) for case in cases)
    step_ms = {
        Case(row.implementation, row.mode, row.bucket_cap_mb, row.link): row.step_ms
        for row in sorted(summary, key=lambda row: -(row.no_sync_every or 1))
        if row.step_ms is not None
    }
    best: dict[str, Case] = {}
    for case in sorted(cases, key=lambda case: (step_ms.get(case, math.inf), abs((case.bucket_cap_mb or 0) - 25))):
        if case.mode == modes[case.implementation]:
            best.setdefault(case.implementation, case)
    return sorted(best.values(), key=lambda case: implementation_order(case.implementation))


def unique(values: Iterable[str]) -> list[str]:
    """Each value once, in the order of its first appearance."""
    return list(dict.fromkeys(values))


def failures(rows: Iterable[SummaryRow]) -> list[tuple[str, list[str]]]:
    """Implementations with failed rows, each with the settings under which it failed; none if it always failed."""
    rows = sorted(rows, key=lambda row: link_order(row.link))
    found = []
    for name in sorted({row.implementation for row in rows if row.status != "ok"}, key=implementation_order):
        failed = [_settings(row) for row in rows if row.implementation == name and row.status != "ok"]
        others = [_settings(row) for row in rows if row.implementation == name and row.status == "ok"]
        chosen = _telling_apart(failed, others)
        found.append((name, unique(" ".join(settings[i] for i in chosen) for settings in failed) if others else []))
    return found


def _telling_apart(failed: Sequence[tuple[str, ...]], others: Sequence[tuple[str, ...]]) -> tuple[int, ...]:
    """The fewest positions whose values never agree between the two; all of them if there are none."""
    positions = range(len(failed[0]))
    for num in positions:
        for chosen in itertools.combinations(positions, num):
            values = {tuple(settings[i] for i in chosen) for settings in failed}
            if not any(tuple(settings[i] for i in chosen) in values for settings in others):
                return chosen
    return tuple(positions)


def _settings(row: SummaryRow) -> tuple[str, ...]:
    cap = "" if row.bucket_cap_mb is None else f"{row.bucket_cap_mb:g} MiB"
    return link_name(row.link), row.mode, cap, f"no_sync_every={row.no_sync_every or 1:g}"


def _position(value: str, known: Sequence[str]) -> int:
    return known.index(value) if value in known else len(known)
