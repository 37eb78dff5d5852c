"""All ranks start collectives in one order, over all the communicators that they share.

NCCL needs that: two communicators whose kernels do not fit onto a device together wait for each other if two ranks
start them in different orders.
"""

from __future__ import annotations

import pytest
from in_ci import only
from programs import PROGRAMS
from rank_pool import Ranks
from simulated_group import Launch
from stage import DISTINCT, perform

SEEDS = (1, 2, 3)


def launches_with_pauses(name: str, seed: int) -> list[Launch]:
    return perform(PROGRAMS[name], DISTINCT, delays=seed).launches


@pytest.mark.parametrize("seed", only([1], SEEDS))
@pytest.mark.parametrize("name", only(["hierarchical, two nodes", "sharded"], PROGRAMS))
def test_collectives_start_in_one_order(ranks: Ranks, name: str, seed: int) -> None:
    first, second = ranks(2).run(launches_with_pauses, name, seed)
    shared = {launch.group for launch in first} & {launch.group for launch in second}
    assert shared
    # A message is sent by one rank and received by the other.
    orders = [[(g, name.replace("recv", "send")) for g, name in rank if g in shared] for rank in (first, second)]
    assert orders[0] == orders[1]
