"""Buckets launched inside the compiled backward: early where that is safe, and an error where it was not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import own_batch, pair, train_beside
from in_ci import only
from models import Mlp, largest, loss_of
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from ways_to_train import APPEARS_AT, WAYS, count_early

from ddp_compile import ddp_compile
from ddp_compile.comm_hooks import allreduce_hook
from ddp_compile.errors import GradientArrivalError

LATE_WAYS = [
    "contributor_that_appears_on_one_rank",
    "tensor_hook_on_data_on_one_rank",
]


def mlp() -> nn.Module:
    return Mlp(33, 4)


def averages_and_counts(num_calls: dict[int, int], bucket: Any) -> torch.futures.Future[Tensor]:
    """A hook with a state, which the second call for a bucket in one step would change again."""
    num_calls[bucket.index()] = num_calls.get(bucket.index(), 0) + 1
    return allreduce_hook(None, bucket)


@on_ranks(2)
def test_comm_hooks_with_a_state_are_called_once_for_a_bucket() -> None:
    models = pair(mlp, bucket_cap_mb=0.003, split="backward")
    num_calls: dict[int, int] = {}
    models[0].register_comm_hook(num_calls, averages_and_counts)
    step_of = WAYS["contributor_that_appears_on_one_rank"].step
    assert largest(train_beside(models, step_of, APPEARS_AT + 1, width=33)) == 0.0
    assert num_calls == dict.fromkeys(range(4), APPEARS_AT + 1)
    assert "the comm hook averages_and_counts must not be called twice for a bucket" in str(models[0].explain())


@pytest.mark.parametrize("way", LATE_WAYS)
@on_ranks(2)
def test_comm_hooks_without_a_state_are_called_again(way: str) -> None:
    models = pair(mlp, bucket_cap_mb=0.003, split="backward")
    models[0].register_comm_hook(None, allreduce_hook)
    launched = count_early(models[0])
    assert largest(train_beside(models, WAYS[way].step, APPEARS_AT + 1, width=33)) == 0.0
    assert len(launched) == 3 * (APPEARS_AT + 1)


@pytest.mark.parametrize("way", only(LATE_WAYS[:1], LATE_WAYS))
@on_ranks(2)
def test_a_contributor_that_a_static_graph_had_not_is_an_error_on_every_rank(way: str) -> None:
    model = ddp_compile(mlp(), bucket_cap_mb=0.003, backend="aot_eager", split="backward", static_graph=True)
    for step in range(APPEARS_AT):
        WAYS[way].step(model, own_batch(0, 33, 6), step)
        model.zero_grad()
    with pytest.raises(GradientArrivalError) as raised:
        WAYS[way].step(model, own_batch(0, 33, 6), APPEARS_AT)
    text = str(raised.value)
    assert text.startswith(f"rank {dist.get_rank()}: layers.1.weight got another gradient, on this rank or another one")
    assert "static_graph=True, which promises that all iterations are alike" in text


@pytest.mark.inductor
@on_ranks(2)
def test_gradients_whose_places_are_not_aligned_are_copied() -> None:
    """With a comm hook places have no gaps, so some are not aligned, but compiled code expects aligned ones."""
    # Products alone, which take no C++ kernels, of a number of elements that leaves the next place unaligned.
    settings: Any = {"bucket_cap_mb": 0.009, "split": "backward", "backend": "inductor", "static_graph": True}
    models = pair(lambda: nn.Sequential(*(nn.Linear(33, 33, bias=False) for _ in range(4))), **settings)
    models[0].register_comm_hook(None, allreduce_hook)
    launched = count_early(models[0])
    assert largest(train_beside(models, num_steps=4, width=33)) < 1e-5
    assert len(launched) == 3 * (len(models[0].bucket_plan.buckets) - 1)  # none in the first step
    assert models[0]._ddp_compile_state.compiler.failures == []


class Checkpointed(Mlp):
    """The whole model in one checkpoint, which is one node of the forward graph and flat in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


CAPACITIES = [(0.25, False), (1, False), (5, False), (25, False), (0.25, True)]


@pytest.mark.parametrize(("cap_mb", "checkpointed"), only([(0.25, True)], CAPACITIES))
@on_ranks(2)
def test_every_bucket_but_the_last_leaves_inside_one_backward_whatever_the_capacity(
    cap_mb: float, checkpointed: bool
) -> None:
    make = Checkpointed if checkpointed else Mlp
    models = pair(lambda: make(257, 8), bucket_cap_mb=cap_mb, split="backward")
    launched = count_early(models[0])
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
