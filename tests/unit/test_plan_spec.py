"""Packing gradients into buckets: pure arithmetic, so every claim is checked on plans of a few gradients."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from plans import gradient, gradients, members, plan_in_frames, random_gradients
from process_copies import run_in_copy

from ddp_compile.errors import number_of, with_article
from ddp_compile.plan.builder import PlanBuilder
from ddp_compile.plan.packing import pack, plan_buckets
from ddp_compile.plan.planner import Capacities
from ddp_compile.plan.spec import PADDED_ALIGNMENT_BYTES, BucketPlan, BucketSpec, GradientSpec

MIB = 2**20


# How much goes into a bucket.


HUNDREDS = gradients(*[100] * 9)  # of 400 bytes


@pytest.mark.parametrize(
    ("specs", "cap", "expected"),
    [
        # A bucket closes once it has reached its capacity.
        (HUNDREDS[:4], 1, [[0], [1], [2], [3]]),
        (HUNDREDS[:4], 400, [[0], [1], [2], [3]]),
        (HUNDREDS[:4], 401, [[0, 1], [2, 3]]),
        (HUNDREDS[:4], 800, [[0, 1], [2, 3]]),
        (HUNDREDS[:4], 801, [[0, 1, 2], [3]]),
        (HUNDREDS[:4], 10**9, [[0, 1, 2, 3]]),
        (gradients(10, 5000, 10, 10), 100, [[0, 1], [2, 3]]),
        ([gradient(i, 100, "bfloat16") for i in range(4)], 400, [[0, 1], [2, 3]]),
        # The last capacity of a list holds for all further buckets.
        (HUNDREDS[:5], [400, 800], [[0], [1, 2], [3, 4]]),
        (HUNDREDS, [400, 1200, 800], [[0], [1, 2, 3], [4, 5], [6, 7], [8]]),
        # Buckets leave in the order in which their last gradient is ready, full or not.
        (
            [gradient(0, 1), gradient(1, 1, "bfloat16"), gradient(2, 1, "bfloat16"), gradient(3, 1)],
            1000,
            [[1, 2], [0, 3]],
        ),
        ([gradient(0, 100), gradient(1, 1, "bfloat16"), gradient(2, 100)], 800, [[1], [0, 2]]),
        # A sparse gradient stands alone and closes nothing.
        ([gradient(0, 10), gradient(1, 10, sparse=True), gradient(2, 10)], 1000, [[1], [0, 2]]),
    ],
)
def test_gradients_are_packed_into_buckets(
    specs: list[GradientSpec], cap: int | list[int], expected: list[list[int]]
) -> None:
    plan = plan_buckets(specs, cap)
    assert members(plan.buckets) == expected
    assert [bucket.is_sparse for bucket in plan.buckets] == [specs[group[0]].is_sparse for group in expected]


def test_each_kind_of_gradient_has_buckets_of_its_own_and_steps_through_the_capacities_by_itself() -> None:
    kinds = [("float32", "cpu"), ("bfloat16", "cpu"), ("float32", "cuda")]
    mixed = [gradient(i, 100, *kinds[i % 3]) for i in range(6)] + [gradient(6, 100)]
    plan = plan_buckets(mixed, [400, 800])
    for bucket in plan.buckets:
        assert {(g.dtype, g.device) for g in bucket.gradients} == {(bucket.dtype, bucket.device)}
    caps = {tuple(g.index for g in bucket.gradients): bucket.cap_bytes for bucket in plan.buckets}
    assert caps == {(0,): 400, (1, 4): 400, (2,): 400, (3, 6): 800, (5,): 800}


def test_no_gradients_give_no_buckets() -> None:
    plan = plan_buckets([], 100)
    assert plan.buckets == () and plan.num_bytes == 0 and plan.bucket_of_parameter == {}


@pytest.mark.parametrize("cap", [0, -1, [], [25, 0], [0, 25], [25, -3]])
def test_a_capacity_that_is_not_positive_is_refused(cap: int | list[int]) -> None:
    caps = re.escape(str(cap if isinstance(cap, list) else [cap]))
    with pytest.raises(ValueError, match=rf"bucket capacities {caps} \(bytes\) must be positive and at least one must"):
        plan_buckets(gradients(1), cap)


def test_an_unknown_layout_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(ValueError, match=r"layout='packed' is not known; pass one of \('padded', 'ddp'\)"):
        plan_buckets(gradients(1), 25, layout="packed")  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
def test_one_dtype_is_packed_as_torch_packs_it(seed: int) -> None:
    rng = random.Random(seed)
    numels = [rng.randint(1, 3000) for _ in range(rng.randint(1, 60))]
    caps = [rng.randint(1, 20_000) for _ in range(rng.randint(1, 4))]
    theirs, _ = dist._compute_bucket_assignment_by_size([torch.empty(numel) for numel in numels], caps)
    assert members(plan_buckets(gradients(*numels), caps).buckets) == theirs


@pytest.mark.parametrize("seed", range(8))
def test_no_bucket_of_several_gradients_exceeds_the_limit_of_capacities(seed: int) -> None:
    specs = random_gradients(seed)
    region_of = {i: i // 5 for i in range(len(specs)) if i // 5 % 3}
    for limit in (1, 2000, 9000, 10**6):
        for planner in (Capacities([3000, 20_000]), Capacities([3000, 20_000], limit)):
            buckets = pack(specs, planner, "padded", None, region_of)
            assert sorted(i for bucket in members(buckets) for i in bucket) == list(range(len(specs)))
            sizes = [bucket.num_bytes for bucket in buckets if len(bucket.gradients) > 1]
            if planner.largest_bytes is None:
                assert max(sizes) > 9000
            else:
                assert all(size <= limit for size in sizes)
        if limit == 10**6:
            assert buckets == pack(specs, Capacities([3000, 20_000]), "padded", None, region_of)


# What may share a bucket.


@pytest.mark.parametrize("seed", range(5))
def test_buckets_of_random_gradients_leave_in_the_order_of_their_last_gradients(seed: int) -> None:
    plan = plan_buckets(random_gradients(seed), [1000, 6000])
    last = [bucket.gradients[-1].index for bucket in plan.buckets]
    assert last == sorted(last)


# Where gradients lie in a bucket.


@pytest.mark.parametrize(
    ("layout", "offsets", "num_bytes"),
    [("padded", (0, 128, 256, 512, 512), 768), ("ddp", (0, 4, 132, 264, 264), 4 * (1 + 32 + 33 + 64))],
)
def test_padded_offsets_are_multiples_of_128_bytes_and_ddps_leave_no_gaps(
    layout: Any, offsets: tuple[int, ...], num_bytes: int
) -> None:
    (bucket,) = plan_buckets(gradients(1, 32, 33, 0, 64), 10**6, layout=layout).buckets
    assert PADDED_ALIGNMENT_BYTES == 128
    assert (bucket.byte_offsets, bucket.num_bytes) == (offsets, num_bytes)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_never_overlap_and_lie_inside_their_bucket(seed: int) -> None:
    for bucket in plan_buckets(random_gradients(seed), 5000).buckets:
        ends = [offset + g.num_bytes for offset, g in zip(bucket.byte_offsets, bucket.gradients, strict=True)]
        starts = [*bucket.byte_offsets[1:], bucket.num_bytes]
        assert all(end <= start < end + 128 for end, start in zip(ends, starts, strict=True))
        assert all(offset % 128 == 0 for offset in bucket.byte_offsets)


def test_gradients_of_an_owner_lie_together_after_those_without() -> None:
    owners = [1, None, 0, 1, None]
    specs = [replace(g, owner=owner) for g, owner in zip(gradients(1, 32, 33, 1, 64), owners, strict=True)]
    (bucket,) = plan_buckets(specs, 10**6).buckets
    assert bucket.byte_offsets == (640, 0, 384, 768, 128) and bucket.num_bytes == 896
    assert bucket.bytes_of_owner == {None: (0, 384), 0: (384, 640), 1: (640, 896)}
    assert BucketPlan.from_json(BucketPlan((bucket,)).to_json()).buckets == (bucket,)


# JSON and digest.


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_comes_back_equal_from_its_json(seed: int) -> None:
    builder = PlanBuilder(random_gradients(seed), [1000, 5000], "ddp")
    builder.add_frame(range(10, 20))
    plan = builder.propose()
    again = BucketPlan.from_json(plan.to_json())
    assert again == plan and hash(again) == hash(plan) and again.to_json() == plan.to_json()


def print_digest(plan: str) -> None:
    print(BucketPlan.from_json(plan).digest, hash("a"))


def test_the_digest_is_the_same_in_another_process() -> None:
    plan = plan_buckets(random_gradients(0), [1000, 5000])
    ended = run_in_copy(print_digest, plan.to_json())
    assert ended.exit_code == 0, ended.stderr
    digest, hash_of_a = ended.stdout.split()
    if "PYTHONHASHSEED" not in os.environ:  # nothing may depend on the order of a set
        assert int(hash_of_a) != hash("a")
    assert digest == plan.digest
    assert len(plan.digest) == 16 and int(plan.digest, 16) >= 0


def test_plans_that_differ_in_anything_have_different_digests() -> None:
    one = gradients(100, 200)
    plans = [
        plan_buckets(one, 100),
        plan_buckets(one, 200),
        plan_buckets(one, 10**6),
        plan_buckets(one[::-1], 10**6),
        plan_buckets(one, 10**6, layout="ddp"),
        replace(plan_buckets(one, 10**6), generation=1),
        plan_buckets(gradients(100, 201), 10**6),
        plan_buckets([gradient(0, 100, "float16"), gradient(1, 200, "float16")], 10**6),
        plan_buckets([gradient(0, 100, device="cuda"), gradient(1, 200, device="cuda")], 10**6),
        plan_buckets([gradient(0, 100, sparse=True), gradient(1, 200, sparse=True)], 10**6),
        plan_buckets([GradientSpec(0, "q0", 100, "float32", "cpu"), one[1]], 10**6),
        plan_in_frames(one, [0, 1]),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)


def test_json_of_another_version_is_refused() -> None:
    document = json.loads(plan_buckets(gradients(1), 100).to_json())
    document["version"] = 99
    with pytest.raises(ValueError, match=r"JSON version 99, but this version of ddp_compile reads 2; install the same"):
        BucketPlan.from_json(json.dumps(document))


def changed(*path: Any, to: Any) -> Callable[[Any], None]:
    """Put something else in one place of a plan's document."""

    def change(document: Any) -> None:
        *way, last = path
        for step in way:
            document = document[step]
        document[last] = to

    return change


def dropped(*path: Any) -> Callable[[Any], None]:
    def drop(document: Any) -> None:
        *way, last = path
        for step in way:
            document = document[step]
        del document[last]

    return drop


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dropped("version"), "it lacks ['version']"),
        (dropped("generation"), "it lacks ['generation']"),
        (dropped("buckets"), "it lacks ['buckets']"),
        (changed("more", to=1), "it has ['more'], which this version of ddp_compile does not know"),
        (changed("generation", to=-1), "its generation is -1, not a whole number of at least 0"),
        (changed("generation", to=True), "its generation is True"),
        (changed("generation", to=0.5), "its generation is 0.5"),
        (changed("buckets", to={}), "its buckets are {}, not a list"),
        (changed("buckets", 1, to="x" * 999), "bucket 1 is "),
        (dropped("buckets", 1, "dtype"), "bucket 1 lacks ['dtype']"),
        (changed("buckets", 1, "cap", to=1), "bucket 1 has ['cap']"),
        (changed("buckets", 1, "dtype", to="float33"), "the dtype of bucket 1 is 'float33'"),
        (changed("buckets", 1, "dtype", to="Tensor"), "the dtype of bucket 1 is 'Tensor'"),
        (changed("buckets", 1, "dtype", to=None), "the dtype of bucket 1 is None"),
        (changed("buckets", 1, "device", to=0), "the device of bucket 1 is 0"),
        (changed("buckets", 1, "sparse", to=0), "'sparse' of bucket 1 is 0"),
        (changed("buckets", 1, "sparse", to=True), "bucket 1 has 2 gradients"),
        (changed("buckets", 1, "layout", to="packed"), "the layout of bucket 1 is 'packed'"),
        (changed("buckets", 1, "layout", to=[]), "the layout of bucket 1 is []"),
        (changed("buckets", 1, "cap_bytes", to=0), "the capacity of bucket 1 is 0, not a whole number of at least 1"),
        (changed("buckets", 1, "frame", to="0"), "the frame of bucket 1 is '0'"),
        (changed("buckets", 1, "gradients", to=[]), "bucket 1 has 0 gradients"),
        (changed("buckets", 1, "gradients", to=None), "the gradients of bucket 1 are None, not a list"),
        (changed("buckets", 1, "gradients", 0, to=[1, "p1"]), "a gradient of bucket 1 is [1, 'p1']"),
        (changed("buckets", 1, "gradients", 0, 1, to=7), "a gradient of bucket 1 is [2, 7, 1, None]"),
        (changed("buckets", 1, "gradients", 0, 3, to=-1), "the owner of 'p2' in bucket 1 is -1"),
        (changed("buckets", 1, "gradients", 0, 3, to="0"), "the owner of 'p2' in bucket 1 is '0'"),
        (changed("buckets", 1, "gradients", 0, 0, to="2"), "the number of parameter 'p2' in bucket 1 is '2'"),
        (changed("buckets", 1, "gradients", 0, 0, to=-1), "the number of parameter 'p2' in bucket 1 is -1"),
        (changed("buckets", 1, "gradients", 0, 0, to=4), "the number 4 of parameter 'p2' is out of range"),
        (changed("buckets", 1, "gradients", 0, 0, to=3), "parameter 3 is in it as 'p2' and again as 'p3'"),
        (changed("buckets", 1, "gradients", 0, 2, to=-1), "the number of elements of 'p2' in bucket 1 is -1"),
        (dropped("buckets", 0), "the number 2 of parameter 'p2' is out of range, as it holds 2 parameters"),
    ],
)
def test_a_malformed_plan_is_refused_with_what_is_wrong(change: Callable[[Any], None], said: str) -> None:
    document = json.loads(plan_buckets(gradients(1, 1, 1, 1), 8).to_json())
    change(document)
    with pytest.raises(ValueError) as refused:
        BucketPlan.from_json(json.dumps(document))
    assert str(refused.value).startswith(f"bucket plan is malformed: {said}") and len(str(refused.value)) < 300
    assert "Pass the text that BucketPlan.to_json() returned" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it cannot be read (Expecting value"),
        ('{"version":1', "it cannot be read"),
        ("[]", "it is [], not an object with the keys"),
        ('{"version":1,"generation":0,"buckets":[],"buckets":[]}', "it cannot be read (['buckets'] appear twice"),
    ],
)
def test_text_that_is_no_plan_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        BucketPlan.from_json(text)
    assert str(refused.value).startswith(f"bucket plan is malformed: {said}")


def test_the_table_shows_one_bucket_a_line() -> None:
    specs = [
        GradientSpec(0, "embed.weight", 3 * MIB, "float32", "cpu", is_sparse=True),
        GradientSpec(1, "body.weight", MIB, "bfloat16", "cuda"),
        GradientSpec(2, "body.bias", 1024, "bfloat16", "cuda"),
        GradientSpec(3, "head.weight", MIB // 2, "float32", "cpu"),
    ]
    builder = PlanBuilder(specs, [MIB // 2, 25 * MIB])
    builder.add_frame([2, 1])
    table = builder.propose().format_table()
    head, _, digest = table.rpartition(" ")
    assert digest == builder.propose().digest
    assert_expected_inline(
        head,
        """\
bucket    MiB  cap MiB  dtype     device  gradients  from          to            frame
------  -----  -------  --------  ------  ---------  ------------  ------------  -----
     0   2.00     0.50  bfloat16  cuda            2  body.bias     body.weight   0
     1   2.00     0.50  float32   cpu             1  head.weight   head.weight   eager
     2  12.00    25.00  float32   cpu      1 sparse  embed.weight  embed.weight  eager
3 buckets, 4 gradients, 16.00 MiB, generation 0, plan""",
    )


def test_a_plan_whose_buckets_contradict_each_other_is_an_error() -> None:
    first, second = (BucketSpec(i, (gradient(i, 100),), 400) for i in range(2))
    with pytest.raises(ValueError, match="has parameter 0 twice"):
        BucketPlan((first, BucketSpec(1, first.gradients, 100)))
    with pytest.raises(ValueError, match=r"numbered 0, 1, 2, ... in launch order, not \[1, 0\]"):
        BucketPlan((second, first))


# Words of messages.


@pytest.mark.parametrize(("count", "said"), [(0, "0 buckets"), (1, "1 bucket"), (2, "2 buckets")])
def test_one_has_no_plural(count: int, said: str) -> None:
    assert number_of(count, "bucket") == said


@pytest.mark.parametrize(
    "said",
    [
        "a Linear",
        "an OptimizedModule",
        "an FSDPModule",
        "an MLP",
        "a DDP",
        "a UNet",
        "an int",
        "a list",
        "an X",
        "a UserModel",
        "an Mlp",
        "an Uncle",
    ],
)
def test_the_article_is_the_one_that_is_spoken(said: str) -> None:
    assert with_article(said.split()[1]) == said
