"""Buckets launched inside the compiled backward: exact in every way to train, and early where that is safe."""

from __future__ import annotations

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
from beside import beside_plain, difference, own_batch, pair, train_beside
from in_ci import only
from models import Mlp, largest, loss_of
from rank_pool import on_ranks
from torch import Tensor, nn

from ddp_compile import ddp_compile
from ddp_compile.comm_hooks import allreduce_hook
from ddp_compile.errors import GradientArrivalError


class Trained(NamedTuple):
    """The results of training.

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
    settings = {"bucket_cap_mb": 0.003, "backend": backend, "split": "backward", **settings}
    models = (pair if is_ddps else beside_plain)(make, **settings)
    launched, num_early = count_early(models[0]), []

    def counted(model: nn.Module, x: Tensor, step: int) -> None:
        launched.clear()
        with torch._functorch.config.patch(donated_buffer=False):
            step_of(model, x, step)
        if model is models[0]:
            num_early.append(len(launched))

    worst = largest(train_beside(models, counted, NUM_STEPS, width=33, rows=6, lr=0.1))
    assert models[0]._ddp_compile_state.compiler.failures == []
    return Trained(worst, tuple(num_early))


# One of those in which the same thing happens to the buckets; SETTINGS_IN_CI has others.
PATTERNS_IN_CI = [
    "contributor_that_appears_on_one_rank",
    "hook_while_accumulating",
    "losses_one_by_one",
    "sparse_regularizer",
]


@pytest.mark.parametrize("pattern", only(PATTERNS_IN_CI, PATTERNS))
@on_ranks(2)
def test_gradients_are_exact_and_buckets_are_launched_early(pattern: str) -> None:
    trained = train(pattern, "aot_eager")
    # A sum of the previous iteration and this one rounds differently from the sum of both.
    assert trained.worst <= (0.0 if PATTERNS[pattern].is_ddps else 1e-6)
    assert trained.num_early == PATTERNS[pattern].num_early


UNUSED, STATIC = {"find_unused_parameters": True}, {"static_graph": True}
COPIED, LAZY = {"gradient_as_bucket_view": False}, {"lazy_bucket_allocation": True}
SETTINGS_IN_CI = [
    ("accumulate_in_no_sync", UNUSED),
    ("shared_gradients", STATIC),
    ("plain", {**STATIC, **COPIED}),
    ("contributor_that_appears", COPIED),
    ("contributor_that_appears_on_one_rank", LAZY),
    ("plain", {**STATIC, **LAZY}),
]
SETTINGS = [
    *SETTINGS_IN_CI,
    ("contributor_that_appears_on_one_rank", UNUSED),
    *((pattern, STATIC) for pattern in ("plain", "accumulate", "tensor_hook", "accumulate_in_no_sync")),
    ("accumulate", COPIED),
    *((pattern, LAZY) for pattern in ("plain", "accumulate", "shared_gradients")),
    ("plain", {**COPIED, **LAZY}),
]


@pytest.mark.parametrize(("pattern", "setting"), only(SETTINGS_IN_CI, SETTINGS))
@on_ranks(2)
def test_gradients_are_exact_with_every_setting(pattern: str, setting: dict[str, bool]) -> None:
    assert train(pattern, "aot_eager", **setting) == Trained(0.0, PATTERNS[pattern].num_early)


# Its C++ kernels take the compiler most of half a minute; `test_gradient_parity` has "plain" in CI, without any.
@pytest.mark.inductor
@pytest.mark.long
@pytest.mark.parametrize(
    ("pattern", "static_graph"),
    [
        ("plain", False),
        ("contributor_that_appears_on_one_rank", False),
        ("shared_gradients", False),
        ("shared_gradients", True),
        ("channels_last", False),
        ("channels_last", True),
    ],
)
@on_ranks(2)
def test_gradients_are_exact_under_inductor(pattern: str, static_graph: bool) -> None:
    trained = train(pattern, "inductor", static_graph=static_graph)
    assert trained.worst < 1e-5
    assert trained.num_early == PATTERNS[pattern].num_early


LATE_PATTERNS = ["contributor_that_appears_on_one_rank", "tensor_hook_on_data_on_one_rank"]


def mlp() -> nn.Module:
    return Mlp(33, 4)


def step_until_late(pattern: str, models: tuple[Any, Any]) -> str:
    """The error of the step in which a new contributor appears."""
    model, reference = models
    for step in range(APPEARS_AT):
        for each in models:
            each.zero_grad()
            PATTERNS[pattern].step(each, own_batch(0, 33, 6), step)
    model.zero_grad()
    with pytest.raises(GradientArrivalError) as raised:
        PATTERNS[pattern].step(model, own_batch(0, 33, 6), APPEARS_AT)
    said = str(raised.value)
    late = f"rank {dist.get_rank()}: layers.1.weight got another gradient, on this rank or another one"
    assert said.startswith(late)
    reference.zero_grad()
    PATTERNS[pattern].step(reference, own_batch(0, 33, 6), APPEARS_AT)
    return said


@pytest.mark.parametrize("pattern", only(LATE_PATTERNS[:1], LATE_PATTERNS))
@on_ranks(2)
def test_a_late_contributor_is_an_error_on_every_rank_where_the_bucket_cannot_be_sent_again(pattern: str) -> None:
    models = pair(mlp, bucket_cap_mb=0.003, split="backward")
    models[0].register_comm_hook(None, allreduce_hook)
    assert "the comm hook allreduce_hook must not be called twice" in step_until_late(pattern, models)
    for each in models:
        each.zero_grad()
        PATTERNS[pattern].step(each, own_batch(0, 33, 6), APPEARS_AT + 1)
    assert difference(*models) == 0.0


@pytest.mark.parametrize("pattern", only(LATE_PATTERNS[:1], LATE_PATTERNS))
@on_ranks(2)
def test_a_contributor_that_a_static_graph_had_not_is_an_error_on_every_rank(pattern: str) -> None:
    models = pair(mlp, bucket_cap_mb=0.003, split="backward", static_graph=True)
    said = step_until_late(pattern, models)
    assert "static_graph=True, which promises that every iteration is like the first" in said


@pytest.mark.inductor
@on_ranks(2)
def test_gradients_whose_places_are_not_aligned_wait_for_their_hooks() -> None:
    """With a comm hook places have no gaps, so some are not aligned, but compiled code expects aligned ones."""
    # Products alone, which take no C++ kernels, of a number of elements that leaves the next place unaligned.
    settings: Any = {"bucket_cap_mb": 0.009, "split": "backward", "backend": "inductor", "static_graph": True}
    models = pair(lambda: nn.Sequential(*(nn.Linear(33, 33, bias=False) for _ in range(4))), **settings)
    models[0].register_comm_hook(None, allreduce_hook)
    launched = count_early(models[0])
    train_beside(models, num_steps=2, width=33)
    launched.clear()
    assert largest(train_beside(models, num_steps=1, width=33)) < 1e-5
    assert launched == []
    assert models[0]._ddp_compile_state.compiler.failures == []


CAPACITIES = [(0.25, False), (1, False), (5, False), (25, False), (0.25, True)]


@pytest.mark.parametrize(("cap_mb", "checkpointed"), only([(0.25, True)], CAPACITIES))
@on_ranks(2)
def test_every_bucket_but_the_last_leaves_inside_one_backward_whatever_the_capacity(
    cap_mb: float, checkpointed: bool
) -> None:
    make = Checkpointed if checkpointed else Mlp
    models = pair(lambda: make(257, 8), bucket_cap_mb=cap_mb, split="backward")
    launched = count_early(models[0])
    train_beside(models, num_steps=1, width=257)
    launched.clear()
    assert train_beside(models, num_steps=1, width=257) == [0.0]
    num_buckets = len(models[0].bucket_plan.buckets)
    assert launched == list(range(num_buckets - 1))
    assert num_buckets == {0.25: 8, 1: 2, 5: 2, 25: 2}[cap_mb]
    assert len(models[0]._ddp_compile_state.backend.reports) == 1


@pytest.mark.inductor
@pytest.mark.parametrize("backend", only(["inductor"], ["aot_eager", "inductor"]))
@on_ranks(2)
def test_buckets_leave_while_the_rest_is_computed(backend: str) -> None:
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
