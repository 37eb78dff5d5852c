"""Optimal boundaries: every plan of a few gradients is tried, and none ends a step earlier."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from plans import gradient, gradients, random_gradients

from ddp_compile.plan import optimum
from ddp_compile.plan.costs import Collective, Costs, Link
from ddp_compile.plan.optimum import Piece, merged, optimal_ends
from ddp_compile.plan.packing import pack, plan_buckets
from ddp_compile.plan.planner import MOST_CHANGES, LeastTime
from ddp_compile.plan.schedule import Load, loads_of, predict
from ddp_compile.plan.spec import BucketPlan, renumbered


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


def check_no_plan_ends_earlier(seed: int, num_pieces: int, launches: bool, gathers: bool) -> None:
    rng = random.Random(seed)
    pieces, costs = random_pieces(rng, num_pieces), random_costs(rng, launches, gathers)
    largest_bytes = rng.choice([None, None, 10**6])
    ends = optimal_ends(pieces, costs, largest_bytes)
    tried = list(all_ends(pieces, largest_bytes))
    assert ends in tried
    best_s = min(predict(merged(pieces, each), costs).step_s for each in tried)
    assert predict(merged(pieces, ends), costs).step_s == pytest.approx(best_s, rel=1e-9), (seed, ends)


KINDS = pytest.mark.parametrize(("launches", "gathers"), list(itertools.product([False, True], repeat=2)))


@KINDS
def test_no_plan_of_a_few_gradients_ends_earlier(launches: bool, gathers: bool) -> None:
    for seed in range(200):
        check_no_plan_ends_earlier(seed, 1 + seed % 6 if seed % 40 else 10, launches, gathers)


@pytest.mark.long
@KINDS
def test_no_plan_of_up_to_ten_gradients_ends_earlier(launches: bool, gathers: bool) -> None:
    for seed in range(200, 1200):
        check_no_plan_ends_earlier(seed, 1 + seed % 10, launches, gathers)


@pytest.mark.parametrize("launches", [False, True])
def test_sharded_plans_that_are_refined_come_close_to_the_optimum(
    launches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worst = 1.0
    for seed in range(12):
        rng = random.Random(seed)
        pieces, costs = random_pieces(rng, 40), random_costs(rng, launches, gathers=True)
        largest_bytes = rng.choice([None, 10**6])
        exact = predict(merged(pieces, optimal_ends(pieces, costs, largest_bytes)), costs).step_s
        with monkeypatch.context() as patched:
            patched.setattr(optimum, "EXACT_PIECES", 8)
            refined = merged(pieces, optimal_ends(pieces, costs, largest_bytes))
        assert all(load.num_bytes <= (largest_bytes or 10**9) or load in [p.load for p in pieces] for load in refined)
        worst = max(worst, predict(refined, costs).step_s / exact)
    assert 1 <= worst < 1.02


def test_five_thousand_gradients_are_planned_with_the_launches_that_pay() -> None:
    pieces = [Piece(Load(40_000, 0.1 * i / 5000)) for i in range(1, 5001)]
    costs = Costs(reduce=Collective(latency_s=2e-4, s_per_byte=2.5e-10), ready_s=(), launch_s=2e-5)
    loads = merged(pieces, optimal_ends(pieces, costs))
    capacity = merged(pieces, list(range(625, 5001, 625)))  # of 25 MB
    assert sum(load.num_bytes for load in loads) == 5000 * 40_000 and 3 < len(loads) < 30
    ours, theirs = (predict(each, costs) for each in (loads, capacity))
    assert ours.exposed_s < 0.1 * theirs.exposed_s and ours.step_s < theirs.step_s


@pytest.mark.parametrize("launch_s", [0.0, 2e-5])
def test_five_thousand_gradients_of_a_sharded_optimizer_are_planned_in_few_buckets(launch_s: float) -> None:
    pieces = [Piece(Load(40_000, 0.1 * i / 5000, 0.05 * (1 - i / 5000))) for i in range(1, 5001)]
    half = Collective(latency_s=1e-4, s_per_byte=2.5e-10)
    costs = Costs(reduce=half, gather=half, ready_s=(), launch_s=launch_s, step_s_per_byte=5e-11)
    ends = optimal_ends(pieces, costs)
    assert ends == sorted(set(ends)) and ends[-1] == 5000 and 3 < len(ends) < 60
    step_s = predict(merged(pieces, ends), costs).step_s
    capacities = [[*range(size, 5000, size), 5000] for size in (50, 125, 250, 625, 1250, 5000)]
    assert step_s < min(predict(merged(pieces, each), costs).step_s for each in capacities)


@pytest.mark.parametrize("odd", ["empty", "alternating", "needed at once", "limited to a byte", "limited"])
def test_refined_plans_keep_kinds_apart_and_the_limit(odd: str) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        pieces = random_pieces(rng, 49 if seed % 2 else 200)
        if odd == "empty":
            pieces = [Piece(Load(0, 0.0, 0.0))] * len(pieces)
        elif odd == "alternating":
            pieces = [piece._replace(opens=i % 2 == 1) for i, piece in enumerate(pieces)]
        elif odd == "needed at once":
            pieces = [piece._replace(load=piece.load._replace(needed_s=0.0)) for piece in pieces]
        largest_bytes = {"limited to a byte": 1, "limited": 10**6}.get(odd)
        ends = optimal_ends(pieces, random_costs(rng, seed % 4 < 2, gathers=True), largest_bytes)
        assert ends == sorted(set(ends)) and ends[0] > 0 and ends[-1] == len(pieces)
        for begin, end in itertools.pairwise([0, *ends]):
            assert not any(piece.opens for piece in pieces[begin + 1 : end])
            size = sum(piece.load.num_bytes for piece in pieces[begin:end])
            assert largest_bytes is None or end == begin + 1 or size <= largest_bytes


def test_a_schedule_says_when_each_bucket_is_ready_launched_done_and_waited_for() -> None:
    reduce = Collective(latency_s=1.0, s_per_byte=0.01)
    costs = Costs(reduce=reduce, ready_s=(), launch_s=0.5, forward_s=10.0, step_s_per_byte=0.001)
    schedule = predict([Load(100, 1.0), Load(400, 2.0)], costs)
    assert [(b.ready_s, b.launched_s, b.done_s, b.exposed_s) for b in schedule.buckets] == [
        (1.0, 1.5, 3.5, 0.5),  # the backward ends at 3
        (2.5, 3.0, 8.5, 5.0),
    ]
    assert (schedule.reduced_s, schedule.step_s) == (8.5, 8.5 + 0.5 + 10) and schedule.exposed_s == 5.5
    # Steps in reverse order: 400 bytes from 8.5 to 9.4 with the launch, then 100 bytes to 10, when the forward begins.
    gathered = predict(
        [Load(100, 1.0, needed_s=8.0), Load(400, 2.0, needed_s=1.0)], replace(costs, gather=reduce, needed_s=())
    )
    assert [b.gathered_s for b in gathered.buckets] == pytest.approx([16.4, 14.4])
    assert [b.gather_exposed_s for b in gathered.buckets] == pytest.approx([0.0, 3.4])
    assert gathered.step_s == pytest.approx(10 + 10 + 3.4) and gathered.exposed_s == pytest.approx(5.5 + 3.4)


# `LeastTime`, the planner.


def test_the_planner_of_least_time_keeps_kinds_apart_and_beats_capacities() -> None:
    for seed in range(5):
        specs = random_gradients(seed)
        costs = Costs(
            reduce=Collective(latency_s=1e-5, s_per_byte=1e-8), ready_s=[1e-4 * (i + 1) for i in range(len(specs))]
        )
        plan = BucketPlan(renumbered(pack(specs, LeastTime(costs), "padded", frame=0)))
        assert sorted(plan.bucket_of_parameter) == list(range(len(specs)))
        for bucket in plan.buckets:
            assert len({(g.dtype, g.device) for g in bucket.gradients}) == 1
            assert not bucket.is_sparse or len(bucket.gradients) == 1
        step_s = predict(loads_of(plan, costs), costs).step_s
        for cap_bytes in (1, 4000, 20_000, 10**6):
            assert step_s <= predict(loads_of(plan_buckets(specs, cap_bytes), costs), costs).step_s


def test_the_planner_of_least_time_takes_no_gradients_and_kinds_that_change_often() -> None:
    half = Collective(latency_s=1e-5, s_per_byte=1e-8)
    for number in (0, 1, 2 * MOST_CHANGES):
        specs = [gradient(i, 100, ("float32", "bfloat16")[i % 2]) for i in range(number)]
        ready_s = [1e-6 * i for i in range(number)]
        costs = Costs(reduce=half, gather=half, ready_s=ready_s, needed_s=ready_s)
        buckets = pack(specs, LeastTime(costs), "padded", None)
        assert sorted(g.index for bucket in buckets for g in bucket.gradients) == list(range(number))
        assert len(buckets) <= min(number, 10)


def test_gradients_that_are_ready_at_once_may_share_a_bucket_or_not_whatever_their_region() -> None:
    costs = Costs(reduce=Collective(latency_s=1e-3, s_per_byte=1e-9), ready_s=[1.0, 1.0, 0.5, 0.5])
    (first, second) = pack(
        gradients(100, 100, 100, 100)[::-1], LeastTime(costs), "padded", None, {0: 0, 1: 0, 2: 1, 3: 1}
    )
    assert [[g.index for g in bucket.gradients] for bucket in (first, second)] == [[3, 2], [1, 0]]


# Bad input.


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("setting", ["latency_s", "bytes_per_second", "s_per_byte"])
def test_links_of_no_or_infinite_latency_or_rate_are_refused(setting: str, value: float) -> None:
    kind = Collective if setting == "s_per_byte" else Link
    numbers = {"latency_s": 1e-5} | ({"s_per_byte": 1e-9} if kind is Collective else {"bytes_per_second": 1e9})
    if kind is Link:
        numbers["world_size"] = 4
    with pytest.raises(ValueError, match=rf"{setting}={value} must be above zero and finite; pass for example"):
        kind(**numbers | {setting: value})


def test_costs_of_another_model_are_refused_with_both_numbers() -> None:
    costs = Costs(reduce=Collective(latency_s=1e-5, s_per_byte=1e-9), ready_s=[0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match="the plan has 2 parameters, and the costs are for 3"):
        loads_of(plan_buckets(gradients(1, 1), 100), costs)
    with pytest.raises(ValueError, match=r"ready_s\[1\]=nan must be a finite number of seconds"):
        replace(costs, ready_s=[0.1, math.nan, 0.3])
    with pytest.raises(ValueError, match="needed_s is for 1 parameters, and ready_s for 3"):
        replace(costs, gather=costs.reduce, needed_s=[0.0])


def test_nodes_must_be_full() -> None:
    link = Link(world_size=16, latency_s=1e-5, bytes_per_second=1e9, ranks_per_node=8)
    assert link.all_reduce() == Collective(latency_s=2e-5, s_per_byte=2 * 15 / 16 / 1e9)
    with pytest.raises(ValueError, match="ranks_per_node=5 must be at least 1 and divide world_size=16"):
        replace(link, ranks_per_node=5)
