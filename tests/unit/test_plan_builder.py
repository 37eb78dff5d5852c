"""The plan of a module: it grows frame by frame, is sealed, and has its tail packed again."""

import random

import pytest
from plans import gradient, gradients, members, plan_in_frames, random_gradients

from ddp_compile.plan.builder import PlanBuilder
from ddp_compile.plan.packing import pack
from ddp_compile.plan.spec import BucketPlan, GradientSpec


def test_order_of_frames_and_tail() -> None:
    plan = plan_in_frames(gradients(*[100] * 7), [2, 1], [4, 3], cap_bytes=401)
    assert members(plan.buckets) == [[4, 3], [2, 1], [6, 5], [0]]
    assert [bucket.frame for bucket in plan.buckets] == [1, 0, None, None]
    assert [bucket.index for bucket in plan.buckets] == [0, 1, 2, 3]


def test_frames_after_the_seal() -> None:
    builder = PlanBuilder(gradients(*[100] * 6), [401])
    builder.add_frame([5, 4])
    sealed = builder.propose()
    builder.seal(sealed)
    assert builder.add_frame([0, 3]) == [sealed.buckets[1], sealed.buckets[2]]
    assert members(sealed.buckets) == [[5, 4], [3, 2], [1, 0]]
    assert builder.sealed is sealed


def test_seal_of_another_rank() -> None:
    builder, other = (PlanBuilder(gradients(*[100] * 4), [401]) for _ in range(2))
    builder.add_frame([3, 2])
    other.add_frame([0, 1])
    builder.seal(BucketPlan.from_json(other.propose().to_json()))
    assert members(builder.add_frame([3, 2])) == [[3, 2]]
    assert members(builder.add_frame([1, 2])) == [[0, 1], [3, 2]]


@pytest.mark.parametrize("seed", range(10))
def test_frames_are_numbered_as_in_the_plan(seed: int) -> None:
    rng = random.Random(seed)
    specs = random_gradients(seed, rng.randint(1, 60))
    builder = PlanBuilder(specs, [rng.randint(1, 10_000) for _ in range(rng.randint(1, 3))])
    for number in range(10):
        if number == seed:
            builder.lay_out_as("ddp", {i: rng.randint(0, 3) for i in range(0, len(specs), 2)})
        shown = rng.sample(range(len(specs)), rng.randint(0, len(specs) // rng.randint(1, 4)))
        found, plan = builder.add_frame(shown), builder.propose()
        assert found == [b for b in plan.buckets if {g.index for g in b.gradients} & set(shown)]
        assert sorted(plan.bucket_of_parameter) == list(range(len(specs)))
        assert {b.layout for b in plan.buckets} == {"ddp" if number >= seed else "padded"}


@pytest.mark.parametrize("seed", range(10))
def test_reorder_tail_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    specs = random_gradients(seed)
    builder = PlanBuilder(specs, [rng.randint(1, 20_000)])
    builder.add_frame(rng.sample(range(len(specs)), 12))
    builder.seal(builder.propose())
    order = rng.sample(range(len(specs)), rng.choice([5, 30, len(specs)]))
    plan = builder.reorder_tail(order)
    assert sorted(i for bucket in members(plan.buckets) for i in bucket) == list(range(len(specs)))
    of_frames = {tuple(g.index for g in b.gradients) for b in builder.sealed.buckets if b.frame is not None}
    assert of_frames == {tuple(g.index for g in b.gradients) for b in plan.buckets if b.frame is not None}
    last = [max(order.index(i) if i in order else len(order) for i in bucket) for bucket in members(plan.buckets)]
    assert last == sorted(last)


# Regions, whose gradients come all at once.


EIGHT = gradients(*[100] * 8)  # of 400 bytes, padded to 512
MIXED = [gradient(0, 10), gradient(1, 10, "bfloat16"), gradient(2, 10, sparse=True), gradient(3, 10)]


@pytest.mark.parametrize(
    ("specs", "caps", "region_of", "expected"),
    [
        # Small regions share buckets, which end where one of the regions does.
        (EIGHT, [1000], dict(enumerate([0, 0, 1, 1, 2, 2, 3, 3])), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (EIGHT, [1000], None, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        # A large region has buckets of its own, and nothing waits for it.
        (EIGHT, [900], {2: 0, 3: 0, 4: 0, 5: 0, 6: 1}, [[0, 1], [2, 3, 4], [5], [6, 7]]),
        # A region that exceeds the first capacity alone goes into the second bucket, with others.
        (EIGHT[:7], [500, 1500], {1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2}, [[0], [1, 2, 3, 4], [5, 6]]),
        # Gradients of a region are packed by dtype, and sparse ones alone.
        (MIXED, [1000], dict.fromkeys(range(4), 0), [[2], [0, 3], [1]]),
    ],
)
def test_packing_of_regions(
    specs: list[GradientSpec], caps: list[int], region_of: dict[int, int] | None, expected: list[list[int]]
) -> None:
    assert members(pack(specs, caps, "padded", None, *([] if region_of is None else [region_of]))) == expected


def test_reorder_tail_with_regions() -> None:
    builder = PlanBuilder(gradients(*[100] * 7), [400 * 3], region_of={1: 0, 2: 0, 4: 1, 5: 1})
    assert members(builder.propose().buckets) == [[6, 5, 4], [3, 2, 1], [0]]
    builder.seal(builder.propose())
    # Parameter 2, which has not come at all, stays with its region, whose bucket is then the last one.
    assert members(builder.reorder_tail([4, 0, 1, 5, 3, 6]).buckets) == [[4, 5, 0], [6], [1, 2, 3]]
    assert members(builder.reorder_tail([0, 6, 4, 3, 1, 5, 2]).buckets) == [[0, 6, 4, 5], [3, 1, 2]]


@pytest.mark.parametrize("seed", range(10))
def test_regions_are_whole_or_alone(seed: int) -> None:
    rng = random.Random(seed)
    specs = random_gradients(seed)
    region_of = {i: i // 5 for i in range(len(specs)) if i // 5 % 3}
    buckets = pack(specs, [rng.randint(1, 20_000) for _ in range(2)], "padded", None, region_of)
    assert sorted(i for bucket in members(buckets) for i in bucket) == list(range(len(specs)))
    for region in set(region_of.values()):
        for dtype in ("float32", "bfloat16"):
            held = [b for b in buckets if b.dtype == dtype and not b.is_sparse]
            held = [b for b in held if any(region_of.get(g.index) == region for g in b.gradients)]
            owners = [{region_of.get(g.index) for g in b.gradients} for b in held]
            assert len(held) <= 1 or all(each == {region} for each in owners)
