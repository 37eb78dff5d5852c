"""Each place in the sources that keeps streams in order is needed: without it, some program has a race.

A run takes minutes, so it is in ``make test-long``. In CI, `test_races` fails if any of these places is gone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from programs import PROGRAMS
from rank_pool import Ranks
from simulated_streams import ROOT, Site
from stage import DISTINCT, perform

#: What `ddp_compile.runtime.comm.streams` offers to keep streams in order.
ORDERING = {"record", "record_on", "used_here", "after_current"}


def sites_of(program: str) -> set[Site]:
    return set(perform(PROGRAMS[program], DISTINCT).sites)


def has_races_without(site: Site, program: str) -> bool:
    return bool(perform(PROGRAMS[program], DISTINCT, ignored=site).races)


def calls_in_the_sources() -> Iterator[tuple[str, int]]:
    """Path and line of each call that keeps streams in order."""
    for path in [*ROOT.glob("runtime/**/*.py"), *ROOT.glob("ddp_compile/**/*.py")]:
        if path.name != "streams.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and _name_of(node.func) in ORDERING:
                    yield str(path.relative_to(ROOT)), node.lineno


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        owner = function.value.id if isinstance(function.value, ast.Name) else ""
        return function.attr if owner == "streams" or function.attr == "after_current" else ""
    return function.id if isinstance(function, ast.Name) else ""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_wait_between_streams_is_needed(ranks: Ranks) -> None:
    passed_by = {program: set().union(*ranks(2).run(sites_of, program)) for program in PROGRAMS}
    sites = set().union(*passed_by.values())
    places = {(site.path, site.line) for site in sites}
    assert set(calls_in_the_sources()) <= places, "a program has to pass each of these"
    survivors = []
    for site in sorted(sites):
        # The programs that pass few others are about this one.
        programs = sorted((p for p in PROGRAMS if site in passed_by[p]), key=lambda p: len(passed_by[p]))
        if not any(any(ranks(2).run(has_races_without, site, program)) for program in programs):
            survivors.append(site)
    assert not survivors, "\n".join(map(str, survivors))
