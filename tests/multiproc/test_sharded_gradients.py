"""Gradients of a sharded optimizer, whole and by their norm, beside those without shards."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from models import Mlp, loss_of
from rank_pool import RankPool
from test_sharded_optimizer import WIDTH, batch
from test_sharded_parameters import make

Ranks = Callable[[int], RankPool]


@torch.compiler.set_stance("force_eager")
def norms(dtype: torch.dtype) -> list[tuple[float, float]]:
    """Of this model and of one without shards; the last one of a gradient that is not a number on one rank."""
    found = []
    for sharded in (True, False):
        torch.manual_seed(1)
        model, _ = make(module=Mlp(WIDTH, 3).to(dtype), sharded=sharded)
        loss_of(model(batch(0).to(dtype))).backward()
        of_this = [model.clip_grad_norm_(100.0, order) for order in (1.0, 2.0, math.inf)]
        assert all(norm.dtype == dtype for norm in of_this)
        model.zero_grad()
        inputs = batch(1).to(dtype)
        inputs[0, 0] = math.nan
        loss_of(model(inputs)).backward()
        found.append([float(norm) for norm in (*of_this, model.clip_grad_norm_(1.0, math.inf))])
    return list(zip(*found, strict=True))


def test_norms_are_those_without_shards(ranks: Ranks) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-13)):
        for found in ranks(2).run(norms, dtype):
            for ours, theirs in found:
                assert ours == pytest.approx(theirs, rel=tolerance, nan_ok=True)


@torch.compiler.set_stance("force_eager")
def gradients_of_all() -> tuple[bool, bool]:
    found = []
    for sharded in (True, False):
        model, _ = make(sharded=sharded, find_unused_parameters=True)
        model.layers[3].requires_grad_(False)
        loss_of(model(batch(0))).backward()
        found.append(model.full_gradients())
    ours, theirs = found
    return list(ours) == list(theirs), all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_full_gradients_are_those_without_shards(ranks: Ranks) -> None:
    assert ranks(2).run(gradients_of_all) == [(True, True), (True, True)]
