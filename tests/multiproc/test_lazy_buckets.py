"""Flat buffers that are let go when each backward has ended: the gradients are the same in every way to train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_ci import only
from rank_pool import RankPool, on_ranks
from test_split_backward import train as train_backward_pattern
from test_training_patterns import PATTERNS
from test_training_patterns import train as train_pattern
from test_unused_parameters import branch_by_rank_and_step
from torch import Tensor, nn

from ddp_compile import ddp_compile

Ranks = Callable[[int], RankPool]

EARLY = ["plain", "accumulate", "contributor_that_appears_on_one_rank", "shared_gradients"]


@pytest.fixture(autouse=True)
def with_lazy_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every call of `ddp_compile`, in the ranks of a `RankPool` as well."""
    defaults = ddp_compile.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "lazy_bucket_allocation", True)


@on_ranks(2)
def test_gradients_are_exact_where_buckets_leave_early() -> None:
    worst = {name: train_backward_pattern(name, "aot_eager").worst for name in EARLY}
    worst["moved"] = train_backward_pattern("plain", "aot_eager", static_graph=True).worst
    worst["copied back"] = train_backward_pattern("plain", "aot_eager", gradient_as_bucket_view=False).worst
    assert max(worst.values()) < 1e-6, worst


@pytest.mark.parametrize("pattern", only(["gradients_freed_in_between"], PATTERNS))
def test_gradients_are_those_of_ddp_however_it_trains(pattern: str, split: str, each_split: str, ranks: Ranks) -> None:
    assert max(ranks(2).run(train_pattern, pattern)) < 1e-5


@pytest.mark.parametrize("as_view", only([True], [True, False]))
def test_unused_parameters_keep_what_they_hold(as_view: bool, ranks: Ranks) -> None:
    for worst, _ in ranks(2).run(branch_by_rank_and_step, "tensor", as_view, not as_view, "aot_eager"):
        assert worst < 1e-6


class BackToFront(nn.Module):
    """Its gradients come in registration order, so that all buckets are packed anew behind the first iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


@on_ranks(2)
def test_buckets_that_are_packed_anew_are_allocated_in_the_backward() -> None:
    model: Any = ddp_compile(BackToFront(), bucket_cap_mb=0.005)
    counts = []
    for _ in range(3):
        model.zero_grad()
        loss = model(torch.randn(2, 32)).sum()
        buckets = model._ddp_compile_state.reducer.buckets
        counts.append(sum(bucket._buffer._tensor is not None for bucket in buckets))
        loss.backward()
    assert model.bucket_plan.generation == 1
    assert counts == [0, 0, 0]
