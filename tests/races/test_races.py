"""No program has two accesses to memory that no wait orders, whichever streams it runs on."""

from __future__ import annotations

import pytest
import torch
from in_ci import only
from programs import PROGRAMS, STEADY_PROGRAMS
from rank_pool import Ranks
from stage import DISTINCT, Outcome, all_roles, perform, perform_without_streams

ROLES = {"distinct": DISTINCT, "default": all_roles("default"), "side": all_roles("side")}


def perform_by_name(name: str, roles: str) -> tuple[Outcome, Outcome]:
    return perform(PROGRAMS[name], ROLES[roles]), perform_without_streams(PROGRAMS[name], ROLES[roles])


def count_host_waits(name: str, roles: str) -> Outcome:
    return perform(STEADY_PROGRAMS[name], ROLES[roles])


IN_CI = [
    "backward split", "graph break", "accumulation", "normalized", "normalized, sharded", "clipped", "late gradients",
    "join", "bf16 hook", "hierarchical, two nodes", "QAdam", "DiLoCo", "sharded", "sharded, whole parameters",
]  # fmt: skip


@pytest.mark.parametrize("roles", only(["distinct"], ROLES))
@pytest.mark.parametrize("name", only(IN_CI, PROGRAMS))
def test_everything_that_is_written_is_waited_for(ranks: Ranks, name: str, roles: str) -> None:
    for outcome, without_streams in ranks(2).run(perform_by_name, name, roles):
        assert not outcome.races, "\n".join(outcome.races)
        for found, expected in zip(outcome.parameters, without_streams.parameters, strict=True):
            assert torch.isfinite(found).all()
            if name != "asynchronous average":  # its rounds come at random times
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", only(["backward split", "unused parameters", "sharded"], STEADY_PROGRAMS))
def test_host_never_waits_in_steady_state(ranks: Ranks, name: str) -> None:
    for outcome in ranks(2).run(count_host_waits, name, "distinct"):
        assert outcome.host_waits == []
