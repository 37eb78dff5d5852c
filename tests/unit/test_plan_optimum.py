"""Optimal boundaries: every plan of a few gradients is tried, and none ends a step earlier."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from ddp_compile.plan.costs import Collective, Costs
from ddp_compile.plan.optimum import Piece, merged, optimal_ends
from ddp_compile.plan.schedule import Load, predict


def random_collective(rng: random.Random) -> Collective:
    return Collective(latency_s=rng.choice([1e-6, 1e-5, 1e-4, 1e-3]), s_per_byte=rng.choice([0.1, 1, 10]) * 1e-9)


def random_costs(rng: random.Random, launches: bool, gathers: bool) -> Costs:
    return Costs(
        reduce=random_collective(rng),
        ready_s=(),
        launch_s=rng.choice([1e-6, 1e-5, 1e-4, 5e-4]) if launches else 0.0,
        step_s_per_byte=rng.choice([0, 1e-11, 1e-10, 1e-9, 1e-8]),
        forward_s=0.01,
        gather=random_collective(rng) if gathers else None,
    )


def random_pieces(rng: random.Random, num_pieces: int) -> list[Piece]:
    """Pieces of any size, some of them ready at the same time or later than the next one."""
    sizes = rng.choice([[0, 1, 10**6], [10**4, 10**5, 10**6], [10**6], [100, 10**7]])
    now, needed, pieces = 0.0, 0.01, []
    for _ in range(num_pieces):
        now += rng.choice([0, 0, 1e-5, 1e-4, 1e-3]) * rng.random()
        needed = max(0.0, needed - rng.choice([0, 1e-4, 2e-3]) * rng.random())
        late, early = (rng.choice([0, 0, 0, 1e-3]) * rng.random() for _ in range(2))
        load = Load(int(rng.choice(sizes) * rng.random()), now + late, max(0.0, needed - early))
        pieces.append(Piece(load, opens=rng.random() < 0.1))
    return pieces


def all_ends(pieces: list[Piece], largest_bytes: int | None) -> Iterator[list[int]]:
    inner = range(1, len(pieces))
    for count in range(len(pieces)):
        for chosen in itertools.combinations(inner, count):
            ends = [*chosen, len(pieces)]
            groups = [pieces[begin:end] for begin, end in itertools.pairwise([0, *ends])]
            if any(piece.opens for group in groups for piece in group[1:]):
                continue
            sizes = [sum(piece.load.num_bytes for piece in group) for group in groups if len(group) > 1]
            if largest_bytes is None or all(size <= largest_bytes for size in sizes):
                yield ends


@pytest.mark.parametrize(("launches", "gathers"), itertools.product([False, True], repeat=2))
def test_no_plan_of_up_to_ten_gradients_ends_earlier(launches: bool, gathers: bool) -> None:
    for seed in range(250):
        rng = random.Random(seed)
        pieces, costs = random_pieces(rng, 1 + seed % 10), random_costs(rng, launches, gathers)
        largest_bytes = rng.choice([None, None, 10**6])
        ends = optimal_ends(pieces, costs, largest_bytes)
        tried = list(all_ends(pieces, largest_bytes))
        assert ends in tried
        best_s = min(predict(merged(pieces, each), costs).step_s for each in tried)
        assert predict(merged(pieces, ends), costs).step_s == pytest.approx(best_s, rel=1e-9), (seed, ends)
