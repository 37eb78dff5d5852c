"""Predicted steps and the fastest plan: every plan of a few gradients is tried, and none ends a step earlier."""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest
from plans import gradients, random_gradients

from ddp_compile.plan.costs import Collective, Costs, Link
from ddp_compile.plan.optimum import fastest_plan, optimal_ends
from ddp_compile.plan.packing import plan_buckets
from ddp_compile.plan.schedule import predict
from ddp_compile.plan.spec import BucketPlan, BucketSpec, GradientSpec


def ending_at(specs: Sequence[GradientSpec], ends: Iterable[int]) -> BucketPlan:
    parts = enumerate(itertools.pairwise([0, *ends]))
    return BucketPlan(tuple(BucketSpec(i, tuple(specs[begin:end]), 1) for i, (begin, end) in parts))


def random_specs(rng: random.Random, count: int) -> tuple[list[GradientSpec], list[float]]:
    """Gradients of any size, some of them ready at the same time or later than the next one."""
    sizes = rng.choice([[0, 1, 10**6], [10**4, 10**5, 10**6], [10**6], [100, 10**7]])
    now, numels, ready_s = 0.0, [], []
    for _ in range(count):
        now += rng.choice([0, 0, 1e-5, 1e-4, 1e-3]) * rng.random()
        numels.append(int(rng.choice(sizes) * rng.random()))
        ready_s.append(now + rng.choice([0, 0, 0, 1e-3]) * rng.random())
    return gradients(*numels), ready_s


def all_ends(count: int, opens: list[int]) -> Iterator[list[int]]:
    for number in range(count):
        for chosen in itertools.combinations(range(1, count), number):
            if set(opens) <= set(chosen):
                yield [*chosen, count]


def check_no_plan_ends_earlier(seed: int, count: int) -> None:
    rng = random.Random(seed)
    (specs, ready_s), opens = random_specs(rng, count), [i for i in range(1, count) if rng.random() < 0.1]
    reduce = Collective(latency_s=rng.choice([1e-6, 1e-5, 1e-4, 1e-3]), s_per_byte=rng.choice([0.1, 1, 10]) * 1e-9)
    launch_s = rng.choice([0, 1e-6, 1e-5, 1e-4, 5e-4])
    costs = Costs(reduce=reduce, ready_s=ready_s, launch_s=launch_s, forward_s=0.01)
    ends, tried = optimal_ends(specs, costs, opens), list(all_ends(count, opens))
    assert ends in tried
    best_s = min(predict(ending_at(specs, each), costs).step_s for each in tried)
    assert predict(ending_at(specs, ends), costs).step_s == pytest.approx(best_s, rel=1e-9), (seed, ends)


def test_no_plan_ends_earlier() -> None:
    for seed in range(400):
        check_no_plan_ends_earlier(seed, 1 + seed % 7 if seed % 40 else 10)


def test_five_thousand_gradients() -> None:
    specs, ready_s = gradients(*[10_000] * 5000), [0.1 * i / 5000 for i in range(1, 5001)]
    costs = Costs(reduce=Collective(latency_s=2e-4, s_per_byte=2.5e-10), ready_s=ready_s, launch_s=2e-5)
    ends = optimal_ends(specs, costs)
    assert 3 < len(ends) < 30 and ends[-1] == 5000
    ours, theirs = (predict(ending_at(specs, each), costs) for each in (ends, range(625, 5001, 625)))
    assert ours.exposed_s < 0.1 * theirs.exposed_s and ours.step_s < theirs.step_s


def test_predicted_step() -> None:
    reduce = Collective(latency_s=1.0, s_per_byte=0.01)
    costs = Costs(reduce=reduce, ready_s=[1.0, 2.0], launch_s=0.5, forward_s=10.0, step_s_per_byte=0.001)
    buckets = [BucketSpec(i, (gradient,), 1, layout="ddp") for i, gradient in enumerate(gradients(25, 100))]
    plan = BucketPlan(tuple(buckets))
    # Launched at 1.5 and 3, when the backward ends. Reduced at 3.5 and 8.5.
    assert predict(plan, costs) == pytest.approx((8.5 + 0.5 + 10, 5.5))
    # Steps in reverse order: 400 bytes from 8.5 to 9.4 with the launch, then 100 bytes to 10, when the forward begins.
    # The gathers end at 14.4 and 16.4, 4.4 s and 6.4 s after that.
    sharded = replace(costs, gather=reduce, needed_s=[8.0, 1.0])
    assert predict(plan, sharded) == pytest.approx((10 + 10 + 3.4, 5.5 + 3.4))
    assert predict(plan, replace(sharded, needed_s=[0.5, 1.0])).exposed_s == pytest.approx(5.5 + 5.9)
    assert predict(BucketPlan(()), replace(costs, ready_s=())) == (10.0, 0.0)
    halves = replace(costs, needed_s=[8.0, 1.0]).sharded(4)
    assert halves == replace(sharded, reduce=reduce.half, gather=reduce.half, step_s_per_byte=0.00025)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_fastest_plan_beats_capacities(is_sharded: bool, mixed: bool) -> None:
    for seed in range(5):
        specs = random_gradients(seed) if mixed else gradients(*(random.Random(seed).choices(range(1, 2000), k=40)))
        half = Collective(latency_s=3e-4, s_per_byte=2e-8)
        ready_s = [1e-4 * (i + 1) for i in range(len(specs))]
        costs = Costs(reduce=half, ready_s=ready_s, needed_s=ready_s[::-1], gather=half if is_sharded else None)
        plan = fastest_plan(specs, costs)
        assert sorted(plan.bucket_of_parameter) == list(range(len(specs)))
        for bucket in plan.buckets:
            assert len({(g.dtype, g.device) for g in bucket.gradients}) == 1
            assert not bucket.is_sparse or len(bucket.gradients) == 1
        last = [max(ready_s[g.index] for g in bucket.gradients) for bucket in plan.buckets]
        assert last == sorted(last)
        step_s = predict(plan, costs).step_s
        if not is_sharded and not mixed:
            assert step_s == pytest.approx(predict(ending_at(specs, optimal_ends(specs, costs)), costs).step_s)
        for cap_bytes in (4000, 20_000, 10**6):
            slack = 1.03 if is_sharded else 1.0  # the capacities that are tried are a factor of sqrt(2) apart
            assert step_s <= slack * predict(plan_buckets(specs, cap_bytes), costs).step_s


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_impossible_links(value: float) -> None:
    match = rf"={value} must be above zero and finite; pass for example"
    with pytest.raises(ValueError, match=f"latency_s{match}"):
        Collective(latency_s=value, s_per_byte=1e-9)
    with pytest.raises(ValueError, match=f"s_per_byte{match}"):
        Collective(latency_s=1e-5, s_per_byte=value)
    with pytest.raises(ValueError, match=f"bytes_per_second{match}"):
        Link(world_size=4, latency_s=1e-5, bytes_per_second=value)


def test_costs_of_another_model() -> None:
    costs = Costs(reduce=Collective(latency_s=1e-5, s_per_byte=1e-9), ready_s=[0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match="the plan has 2 parameters, and the costs are for 3"):
        predict(plan_buckets(gradients(1, 1), 100), costs)
    with pytest.raises(ValueError, match=r"ready_s\[1\]=nan must be a finite number of seconds"):
        replace(costs, ready_s=[0.1, math.nan, 0.3])
    with pytest.raises(ValueError, match="needed_s is for 1 parameter, and ready_s for 3"):
        replace(costs, gather=costs.reduce, needed_s=[0.0])


def test_all_reduce_of_nodes() -> None:
    link = Link(world_size=16, latency_s=1e-5, bytes_per_second=1e9, ranks_per_node=8)
    assert link.all_reduce() == Collective(latency_s=2e-5, s_per_byte=2 * 15 / 16 / 1e9)
    assert link.all_reduce().half == Collective(latency_s=1e-5, s_per_byte=15 / 16 / 1e9)
    assert replace(link, world_size=64).all_reduce().latency_s == pytest.approx(6e-5)  # a tree of 8 nodes
