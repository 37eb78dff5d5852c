"""Packing gradients into buckets: pure arithmetic, so every claim is checked on plans of a few gradients."""

import json
import os
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from plans import gradient, gradients, members, plan_in_frames, random_gradients
from process_copies import run_in_copy

from ddp_compile.plan.builder import PlanBuilder
from ddp_compile.plan.packing import plan_buckets
from ddp_compile.plan.spec import PADDED_ALIGNMENT_BYTES, BucketPlan, BucketSpec, GradientSpec

MIB = 2**20


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
def test_packing(specs: list[GradientSpec], cap: int | list[int], expected: list[list[int]]) -> None:
    plan = plan_buckets(specs, cap)
    assert members(plan.buckets) == expected
    assert [bucket.is_sparse for bucket in plan.buckets] == [specs[group[0]].is_sparse for group in expected]


def test_kinds_use_capacities_separately() -> None:
    kinds = [("float32", "cpu"), ("bfloat16", "cpu"), ("float32", "cuda")]
    mixed = [gradient(i, 100, *kinds[i % 3]) for i in range(6)] + [gradient(6, 100)]
    plan = plan_buckets(mixed, [400, 800])
    for bucket in plan.buckets:
        assert {(g.dtype, g.device) for g in bucket.gradients} == {(bucket.dtype, bucket.device)}
    caps = {tuple(g.index for g in bucket.gradients): bucket.cap_bytes for bucket in plan.buckets}
    assert caps == {(0,): 400, (1, 4): 400, (2,): 400, (3, 6): 800, (5,): 800}


@pytest.mark.parametrize("cap", [0, [], [25, -3]])
def test_bad_capacity(cap: int | list[int]) -> None:
    caps = re.escape(str(cap if isinstance(cap, list) else [cap]))
    with pytest.raises(ValueError, match=rf"bucket capacities {caps} \(bytes\) must be positive and at least one must"):
        plan_buckets(gradients(1), cap)


@pytest.mark.parametrize("seed", range(8))
def test_packing_as_torch(seed: int) -> None:
    rng = random.Random(seed)
    numels = [rng.randint(1, 3000) for _ in range(rng.randint(1, 60))]
    caps = [rng.randint(1, 20_000) for _ in range(rng.randint(1, 4))]
    theirs, _ = dist._compute_bucket_assignment_by_size([torch.empty(numel) for numel in numels], caps)
    assert members(plan_buckets(gradients(*numels), caps).buckets) == theirs


@pytest.mark.parametrize(
    ("layout", "offsets", "num_bytes"),
    [("padded", (0, 128, 256, 512, 512), 768), ("ddp", (0, 4, 132, 264, 264), 4 * (1 + 32 + 33 + 64))],
)
def test_layouts(layout: Any, offsets: tuple[int, ...], num_bytes: int) -> None:
    (bucket,) = plan_buckets(gradients(1, 32, 33, 0, 64), 10**6, layout=layout).buckets
    assert PADDED_ALIGNMENT_BYTES == 128
    assert (bucket.byte_offsets, bucket.num_bytes) == (offsets, num_bytes)


def test_layout_of_owners() -> None:
    owners = [1, None, 0, 1, None]
    specs = [replace(g, owner=owner) for g, owner in zip(gradients(1, 32, 33, 1, 64), owners, strict=True)]
    (bucket,) = plan_buckets(specs, 10**6).buckets
    assert bucket.byte_offsets == (640, 0, 384, 768, 128) and bucket.num_bytes == 896
    assert bucket.bytes_of_owner == {None: (0, 384), 0: (384, 640), 1: (640, 896)}
    assert BucketPlan.from_json(BucketPlan((bucket,)).to_json()).buckets == (bucket,)


def print_digest(plan: str) -> None:
    print(BucketPlan.from_json(plan).digest, hash("a"))


def test_digest_in_another_process() -> None:
    plan = plan_buckets(random_gradients(0), [1000, 5000])
    ended = run_in_copy(print_digest, plan.to_json())
    assert ended.exit_code == 0, ended.stderr
    digest, hash_of_a = ended.stdout.split()
    if "PYTHONHASHSEED" not in os.environ:  # nothing may depend on the order of a set
        assert int(hash_of_a) != hash("a")
    assert digest == plan.digest
    assert len(plan.digest) == 16 and int(plan.digest, 16) >= 0


def test_digests_differ() -> None:
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


DROPPED = object()


def changed(document: Any, *path: Any) -> Any:
    """With something else, or nothing, in one place of a plan's document."""
    *way, last, new = path
    place = document
    for step in way:
        place = place[step]
    if new is DROPPED:
        del place[last]
    else:
        place[last] = new
    return document


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("version", 99), "plan.version is 99, not one of (3,)"),
        (("generation", DROPPED), "plan lacks ['generation']"),
        (("more", 1), "plan has ['more'], which this version of ddp_compile does not know"),
        (("generation", -1), "plan.generation is -1, not at least 0"),
        (("generation", True), "plan.generation is True, not an int"),
        (("buckets", {}), "plan.buckets is {}, not a list"),
        (("buckets", 1, "x" * 999), "plan.buckets[1] is "),
        (("buckets", 1, "dtype", "Tensor"), "plan.buckets[1].dtype is 'Tensor'"),
        (("buckets", 1, "sparse", True), "plan.buckets[1] has 2 gradients, but must have 1 gradient"),
        (("buckets", 1, "layout", []), "plan.buckets[1].layout is [], not one of"),
        (("buckets", 1, "frame", "0"), "plan.buckets[1].frame is '0'"),
        (("buckets", 1, "gradients", []), "plan.buckets[1] has 0 gradients, but must have at least 1"),
        (("buckets", 1, "gradients", 0, [1, "p1"]), "plan.buckets[1].gradients[0] is [1, 'p1'], not a list"),
        (("buckets", 1, "gradients", 0, 1, 7), "plan.buckets[1].gradients[0][1] is 7, not a str"),
        (("buckets", 1, "gradients", 0, 0, 4), "parameter 'p2' has number 4, but the plan has 4 parameters"),
        (("buckets", 1, "gradients", 0, 0, 3), "a BucketPlan has each parameter once, but this has parameter 3 twice"),
    ],
)
def test_malformed_json(change: tuple[Any, ...], said: str) -> None:
    document = changed(json.loads(plan_buckets(gradients(1, 1, 1, 1), 8).to_json()), *change)
    with pytest.raises(ValueError) as refused:
        BucketPlan.from_json(json.dumps(document))
    assert str(refused.value).startswith(f"bucket plan is malformed: {said}") and len(str(refused.value)) < 300
    assert "Pass the unchanged text that BucketPlan.to_json() returned" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("[]", "plan is [], not an object with the keys"),
        ('{"version":1,"generation":0,"buckets":[],"buckets":[]}', "['buckets'] appear twice"),
    ],
)
def test_text_that_is_no_plan(text: str, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        BucketPlan.from_json(text)
    assert str(refused.value).startswith(f"bucket plan is malformed: {said}")


def test_table() -> None:
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


def test_contradicting_buckets() -> None:
    first, second = (BucketSpec(i, (gradient(i, 100),), 400) for i in range(2))
    with pytest.raises(ValueError, match="has parameter 0 twice: 'p0' and 'p0'"):
        BucketPlan((first, BucketSpec(1, first.gradients, 100)))
    with pytest.raises(ValueError, match=r"numbered 0, 1, 2, ... in launch order, not \[1, 0\]"):
        BucketPlan((second, first))
