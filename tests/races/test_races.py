"""No program has two accesses to memory that no wait orders, whichever streams it runs on, and each wait is needed."""

import ast
from collections.abc import Iterator

import pytest
import torch
from in_ci import only
from programs import PROGRAMS, STEADY_PROGRAMS
from rank_pool import Ranks, on_ranks
from simulated_group import Launch
from simulated_streams import ROOT, Site
from stage import DISTINCT, all_roles, perform, perform_without_streams

ROLES = {"distinct": DISTINCT, "default": all_roles("default"), "side": all_roles("side")}


IN_CI = [
    "backward split", "graph break", "accumulation", "normalized", "normalized, sharded", "clipped",
    "late gradients, added", "join", "bf16 hook", "hierarchical, two nodes", "QAdam", "DiLoCo", "sharded",
    "sharded, whole parameters",
]  # fmt: skip


@pytest.mark.parametrize("roles", only(["distinct"], ROLES))
@pytest.mark.parametrize("name", only(IN_CI, PROGRAMS))
@on_ranks(2)
def test_everything_that_is_written_is_waited_for(name: str, roles: str) -> None:
    outcome = perform(PROGRAMS[name], ROLES[roles])
    without_streams = perform_without_streams(PROGRAMS[name], ROLES[roles])
    assert not outcome.races, "\n".join(outcome.races)
    for found, expected in zip(outcome.parameters, without_streams.parameters, strict=True):
        assert torch.isfinite(found).all()
        if name != "asynchronous average":  # its rounds come at random times
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", only(["backward split", "unused parameters", "sharded"], STEADY_PROGRAMS))
@on_ranks(2)
def test_host_never_waits_in_steady_state(name: str) -> None:
    assert perform(STEADY_PROGRAMS[name], DISTINCT).host_waits == []


# All ranks start collectives in one order, over all the communicators that they share. NCCL needs that: two
# communicators whose kernels do not fit onto a device together wait for each other if two ranks start them in different
# orders.


def launches_with_pauses(name: str, seed: int) -> list[Launch]:
    return perform(PROGRAMS[name], DISTINCT, delays=seed).launches


@pytest.mark.parametrize("seed", only([1], [1, 2, 3]))
@pytest.mark.parametrize("name", only(["hierarchical, two nodes", "sharded"], PROGRAMS))
def test_collectives_start_in_one_order(ranks: Ranks, name: str, seed: int) -> None:
    first, second = ranks(2).run(launches_with_pauses, name, seed)
    shared = {launch.group for launch in first} & {launch.group for launch in second}
    assert shared
    # A message is sent by one rank and received by the other.
    orders = [[(g, name.replace("recv", "send")) for g, name in rank if g in shared] for rank in (first, second)]
    assert orders[0] == orders[1]


# Without any of the places in the sources that keep streams in order, some program has a race.

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


@pytest.mark.long  # In CI, the tests above fail if one of most of these places is gone.
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
