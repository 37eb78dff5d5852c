"""Each wait, record and `used_here` of the sources is needed: without it, some program has a race that is found."""

from __future__ import annotations

from collections.abc import Callable

from programs import PROGRAMS
from rank_pool import RankPool
from simulated_streams import Site
from stage import DISTINCT, perform

Ranks = Callable[[int], RankPool]

#: Places that no program needs, each with the reason why it stays.
NOT_NEEDED: dict[tuple[str, str], str] = {}


def find_sites() -> dict[Site, list[str]]:
    """Every place that keeps streams in order, with the programs that pass it, the ones of fewest operators first."""
    found: dict[Site, list[str]] = {}
    for name, program in PROGRAMS.items():
        for site in perform(program, DISTINCT).sites:
            found.setdefault(site, []).append(name)
    return found


def survive(sites: dict[Site, list[str]]) -> list[Site]:
    """The places without which nothing is found."""
    left = []
    for site, names in sites.items():
        if not any(perform(PROGRAMS[name], DISTINCT, ignored=site).races for name in names):
            left.append(site)
    return left
