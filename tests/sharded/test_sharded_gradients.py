"""Gradients of a sharded optimizer, whole and by their norm, beside those without shards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import loss_of
from oracle import batch, equal_on_all_ranks, make, said_by
from rank_pool import on_ranks
from torch import nn


@pytest.mark.parametrize("split", ["forward", "backward"])
@on_ranks(2)
def test_gradients_stay_hidden_after_a_forward(split: str) -> None:
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
    model(batch(3))
    assert all(parameter.grad is None for parameter in model.parameters())  # nothing is hidden where nothing is
    assert len(said) == 3 * 2 * 3
    for text in said:
        assert f"ReplicationError: rank {dist.get_rank()}: " in text
        assert "Clip with model.clip_grad_norm_(max_norm)" in text


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_step_after_the_model_is_gone() -> None:
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
    assert algorithm() is None
    assert equal_on_all_ranks(after) and (before != after).any()
