"""Buckets launched inside the compiled backward: exact in every way to train, and early where that is safe."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from backward_patterns import (
    APPEARS_AT,
    NUM_STEPS,
    PATTERNS,
    Checkpointed,
)
from in_ci import only
from models import Mlp, loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile
from ddp_compile.comm_hooks import allreduce_hook
from ddp_compile.errors import GradientArrivalError

Ranks = Callable[[int], RankPool]


class Trained(NamedTuple):
    """What training has shown.

    Args:
        worst: Largest relative difference of any gradient to the reference, bit for bit equal if 0.
        num_early: How many buckets were launched inside the backward, for each step.
    """

    worst: float
    num_early: tuple[int, ...]


def count_early(model: nn.Module) -> list[int]:
    """A list to which the number of each bucket is appended that is launched inside a backward."""
    queue = model._ddp_compile_state.reducer._queue
    launched, complete_with = [], queue.complete_with

    def counted(bucket: Any, gradients: Any) -> None:
        launched.append(bucket.spec.index)
        complete_with(bucket, gradients)

    queue.complete_with = counted
    return launched


def train(pattern: str, backend: str, **settings: Any) -> Trained:
    step_of, _, make, is_ddps = PATTERNS[pattern]
    torch.manual_seed(3)
    reference = make()
    torch.manual_seed(3)
    model = ddp_compile(make(), bucket_cap_mb=0.003, backend=backend, **{"split": "backward", **settings})
    if is_ddps:
        reference = DistributedDataParallel(reference)
    launched, num_early, worst = count_early(model), [], 0.0
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(NUM_STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(6, 33)
        launched.clear()
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            with torch._functorch.config.patch(donated_buffer=False):
                step_of(each, x, step)
        num_early.append(len(launched))
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            if not is_ddps:
                dist.all_reduce(q.grad)
                q.grad /= dist.get_world_size()
            worst = max(worst, relative_difference(p.grad, q.grad))
        for optimizer in optimizers:
            optimizer.step()
    assert model._ddp_compile_state.compiler.failures == []
    return Trained(worst, tuple(num_early))


# One of those in which the same thing happens to the buckets; SETTINGS_IN_CI has others.
PATTERNS_IN_CI = [
    "contributor_that_appears_on_one_rank",
    "hook_while_accumulating",
    "losses_one_by_one",
    "sparse_regulariser",
]


@pytest.mark.parametrize("pattern", only(PATTERNS_IN_CI, PATTERNS))
def test_gradients_are_exact_and_buckets_are_launched_early(pattern: str, ranks: Ranks) -> None:
    for trained in ranks(2).run(train, pattern, "aot_eager"):
        # A sum of the iteration before and of this one rounds otherwise than the sum of both.
        assert trained.worst <= (0.0 if PATTERNS[pattern].is_ddps else 1e-6)
        assert trained.num_early == PATTERNS[pattern].num_early


SETTINGS_IN_CI = [
    ("accumulate_in_no_sync", {"find_unused_parameters": True}),
    ("shared_gradients", {"static_graph": True}),
    ("plain", {"static_graph": True, "gradient_as_bucket_view": False}),
    ("contributor_that_appears", {"gradient_as_bucket_view": False}),
]


@pytest.mark.parametrize(
    ("pattern", "setting"),
    only(
        SETTINGS_IN_CI,
        [
            ("accumulate_in_no_sync", {"find_unused_parameters": True}),
            ("contributor_that_appears_on_one_rank", {"find_unused_parameters": True}),
            ("plain", {"static_graph": True}),
            ("accumulate", {"static_graph": True}),
            ("tensor_hook", {"static_graph": True}),
            ("accumulate_in_no_sync", {"static_graph": True}),
            ("shared_gradients", {"static_graph": True}),
            ("plain", {"static_graph": True, "gradient_as_bucket_view": False}),
            ("accumulate", {"gradient_as_bucket_view": False}),
            ("contributor_that_appears", {"gradient_as_bucket_view": False}),
        ],
    ),
)
def test_gradients_are_exact_with_every_setting(pattern: str, setting: dict[str, bool], ranks: Ranks) -> None:
    for trained in ranks(2).run(train, pattern, "aot_eager", **setting):
        assert trained == Trained(0.0, PATTERNS[pattern].num_early)


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("pattern", "static_graph"),
    [
        # Its C++ kernels take the compiler most of half a minute; `test_gradient_parity` has it without them.
        pytest.param("plain", False, marks=pytest.mark.long),
        pytest.param("contributor_that_appears_on_one_rank", False, marks=pytest.mark.long),
        pytest.param("shared_gradients", False, marks=pytest.mark.long),
        pytest.param("shared_gradients", True, marks=pytest.mark.long),
        pytest.param("channels_last", False, marks=pytest.mark.long),
        pytest.param("channels_last", True, marks=pytest.mark.long),
    ],
)
def test_gradients_are_exact_under_inductor(pattern: str, static_graph: bool, ranks: Ranks) -> None:
    for trained in ranks(2).run(train, pattern, "inductor", static_graph=static_graph):
        assert trained.worst < 1e-5
        assert trained.num_early == PATTERNS[pattern].num_early


LATE_PATTERNS = ["contributor_that_appears_on_one_rank", "tensor_hook_on_data_on_one_rank"]


@pytest.mark.parametrize("pattern", only(LATE_PATTERNS[:1], LATE_PATTERNS))
@on_ranks(2)
def test_a_late_contributor_is_an_error_on_every_rank_where_the_bucket_cannot_be_sent_again(pattern: str) -> None:
    torch.manual_seed(3)
    reference = DistributedDataParallel(Mlp(33, 4))
    model = ddp_compile(Mlp(33, 4), bucket_cap_mb=0.003, split="backward", backend="aot_eager")
    model.load_state_dict(reference.state_dict())
    model.register_comm_hook(None, allreduce_hook)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(6, 33)
    step_of = PATTERNS[pattern].step
    for step in range(APPEARS_AT):
        model.zero_grad()
        step_of(model, x, step)
    model.zero_grad()
    with pytest.raises(GradientArrivalError) as raised:
        step_of(model, x, APPEARS_AT)
    model.zero_grad()
    step_of(model, x, APPEARS_AT + 1)
    for step in (APPEARS_AT, APPEARS_AT + 1):
        reference.zero_grad()
        step_of(reference, x, step)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    rank = dist.get_rank()
    said = str(raised.value)
    difference = max(relative_difference(p.grad, q.grad) for p, q in pairs)
    assert said.startswith(f"rank {rank}: layers.1.weight got another gradient, on this rank or another one")
    assert "the comm hook allreduce_hook must not be called twice" in said
    assert difference == 0.0


@pytest.mark.inductor
@on_ranks(2)
def test_gradients_whose_places_are_not_aligned_wait_for_their_hooks() -> None:
    """With a comm hook places have no gaps, so that some are not aligned, and compiled code expects that they are."""
    torch.manual_seed(3)
    # Products alone, which take no C++ kernels, of a number of elements that leaves the next place unaligned.
    reference = DistributedDataParallel(nn.Sequential(*(nn.Linear(33, 33, bias=False) for _ in range(4))))
    model = ddp_compile(
        copy.deepcopy(reference.module), bucket_cap_mb=0.009, split="backward", backend="inductor", static_graph=True
    )
    model.register_comm_hook(None, allreduce_hook)
    launched = count_early(model)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(6, 33)
    for _ in range(3):
        launched.clear()
        for each in (model, reference):
            each.zero_grad()
            loss_of(each(x)).backward()
    assert model._ddp_compile_state.compiler.failures == []
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    worst = max(relative_difference(p.grad, q.grad) for p, q in pairs)
    assert worst < 1e-5
    assert launched == []


@pytest.mark.parametrize("pattern", only(LATE_PATTERNS[:1], LATE_PATTERNS))
@on_ranks(2)
def test_a_contributor_that_a_static_graph_had_not_is_an_error_on_every_rank(pattern: str) -> None:
    model = ddp_compile(Mlp(33, 4), bucket_cap_mb=0.003, split="backward", backend="aot_eager", static_graph=True)
    for step in range(APPEARS_AT):
        model.zero_grad()
        PATTERNS[pattern].step(model, torch.ones(6, 33), step)
    model.zero_grad()
    with pytest.raises(GradientArrivalError) as raised:
        PATTERNS[pattern].step(model, torch.ones(6, 33), APPEARS_AT)
    rank = dist.get_rank()
    said = str(raised.value)
    assert said.startswith(f"rank {rank}: layers.1.weight got another gradient, on this rank or another one")
    assert "static_graph=True, which promises that every iteration is like the first" in said


CAPACITIES = [(0.25, False), (1, False), (5, False), (25, False), (0.25, True)]


@pytest.mark.parametrize(("cap_mb", "checkpointed"), only([(0.25, True)], CAPACITIES))
@on_ranks(2)
def test_every_bucket_but_the_last_leaves_inside_one_backward_whatever_the_capacity(
    cap_mb: float, checkpointed: bool
) -> None:
    torch.manual_seed(3)
    make = (lambda: Checkpointed(257, 8)) if checkpointed else (lambda: Mlp(257, 8))
    reference = DistributedDataParallel(make())
    model = ddp_compile(make(), bucket_cap_mb=cap_mb, split="backward", backend="aot_eager")
    model.load_state_dict(reference.module.state_dict())
    torch.manual_seed(dist.get_rank())
    x = torch.randn(6, 257)
    launched = count_early(model)
    for each in (model, reference):
        for _ in range(2):
            launched.clear()
            each.zero_grad()
            loss_of(each(x)).backward()
        if each is model:
            early = list(launched)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    worst = max(relative_difference(p.grad, q.grad) for p, q in pairs)
    num_graphs = len(model._ddp_compile_state.backend.reports)
    num_buckets = len(model.bucket_plan.buckets)
    assert early == list(range(num_buckets - 1))
    assert num_buckets == {0.25: 8, 1: 2, 5: 2, 25: 2}[cap_mb]
    assert num_graphs == 1
    assert worst == 0.0


@pytest.mark.inductor
@pytest.mark.parametrize("backend", only(["inductor"], ["aot_eager", "inductor"]))
@on_ranks(2)
def test_buckets_leave_while_the_rest_is_computed(backend: str) -> None:
    """Microseconds at which buckets were launched and matrix products begun, in one backward after the learning one."""
    torch.manual_seed(3)
    layers = [nn.Linear(257, 257, bias=False) for _ in range(8)]  # products alone: no C++ for inductor to compile
    model = ddp_compile(nn.Sequential(*layers), bucket_cap_mb=0.25, split="backward", backend=backend)
    x = torch.randn(6, 257)
    for _ in range(2):
        model.zero_grad()
        loss_of(model(x)).backward()
    model.zero_grad()
    loss = loss_of(model(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    events: Any = profile.events()
    launches = [event.time_range.start for event in events if event.name.endswith("_launch")]
    products = [event.time_range.start for event in events if event.name == "aten::mm"]
    # Two products for each layer but the first one, whose bucket is launched when the backward ends.
    assert len(launches) == 8 and len(products) == 15
    for i, start in enumerate(sorted(launches)[:7]):
        assert sum(product > start for product in products) >= 15 - 2 * (i + 1)
