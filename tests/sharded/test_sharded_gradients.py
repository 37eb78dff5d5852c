"""Gradients of a sharded optimizer, whole and by their norm, beside those without shards."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import Mlp, loss_of
from oracle import WIDTH, batch, equal_on_all_ranks, make, said_by
from rank_pool import RankPool
from torch import nn

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


def after_a_compiled_forward(split: str) -> list[str]:
    """Between backward and step, in ``no_sync()`` too: what a user's code does that has forgotten the shards."""
    torch._dynamo.reset()
    model, optimizer = make("sgd", backend="aot_eager", split=split)
    first = next(model.parameters())
    said: list[str] = []
    uses: list[Callable[[], Any]] = [
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: first.grad.add_(1.0),
        lambda: first.grad + 1.0,
    ]
    for is_local in (False, True, False):
        loss_of(model(batch(0))).backward()
        with model.no_sync() if is_local else nullcontext():
            out = model(batch(1))

        out.register_hook(lambda _gradient: said.extend(map(said_by, uses)))
        said.extend(map(said_by, uses))
        with model.no_sync() if is_local else nullcontext():
            loss_of(out).backward()
        if is_local:
            loss_of(model(batch(2))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return said


@pytest.mark.parametrize("split", ["forward", "backward"])
def test_gradients_stay_hidden_after_a_forward_that_has_no_backward_yet(ranks: Ranks, split: str) -> None:
    for rank, said in enumerate(ranks(2).run(after_a_compiled_forward, split)):
        assert len(said) == 3 * 2 * 3
        for text in said:
            assert f"ReplicationError: rank {rank}: " in text and "Clip with model.clip_grad_norm_(max_norm)" in text


@torch.compiler.set_stance("force_eager")
def stepped_without_the_model() -> tuple[bool, bool, bool]:
    """A GradScaler asks for the gradients of an optimizer whose model is gone."""
    model, optimizer = make("sgd")
    held, scaler = list(model.parameters()), torch.amp.GradScaler("cpu", init_scale=64.0)
    before = torch.cat([p.detach().flatten() for p in held])
    scaler.scale(loss_of(model(batch(0)))).backward()
    algorithm = weakref.ref(model.comm_algorithm)
    del model
    gc.collect()
    scaler.step(optimizer)
    after = torch.cat([p.detach().flatten() for p in held])
    return algorithm() is None, equal_on_all_ranks(after), bool((before != after).any())


def test_an_optimizer_steps_after_its_model_is_gone(ranks: Ranks) -> None:
    assert ranks(2).run(stepped_without_the_model) == [(True, True, True)] * 2
