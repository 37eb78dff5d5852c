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
import torch.distributed as dist
from models import Mlp, loss_of
from rank_pool import RankPool, on_ranks
from test_sharded_optimizer import WIDTH, batch
from test_sharded_parameters import equal_on_all_ranks, make
from test_sharded_refusals import said_by
from torch import nn

from ddp_compile import ddp_compile, shard_optimizer

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


# Gradients that are not zeroed.


class Uneven:
    """Each of the first two of three ranks owns a matrix, and the first one has all of the biases."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model: Any = ddp_compile(nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 3)), backend="eager")
        parameters = list(self.model.parameters())
        self.optimizers = [torch.optim.Muon(parameters[::2]), torch.optim.SGD(parameters[1::2], lr=0.1, momentum=0.9)]
        shard_optimizer(self.optimizers, self.model, allow_uneven=True)

    def train(self, step: int, zeroed: list[Any]) -> None:
        loss_of(self.model(batch(step))).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        for each in zeroed:
            each.zero_grad()


@on_ranks(3)
@torch.compiler.set_stance("force_eager")
def test_a_forgotten_zero_grad_is_an_error_of_each_rank_that_forgot_it() -> None:
    rank = dist.get_rank()
    for who in (2, None):  # rank 2 has no part of any
        for forgotten, name in ((0, "0.weight"), (1, "0.bias")):
            uneven = Uneven()
            uneven.train(0, uneven.optimizers)
            forgets = who in (rank, None)
            uneven.train(1, uneven.optimizers[1 - forgotten :][:1] if forgets else uneven.optimizers)
            loss = loss_of(uneven.model(batch(2)))
            if forgets:
                told = f"ReplicationError: rank {rank}: a backward has ended, and the gradient of {name} from before"
                assert told in said_by(loss.backward)
            else:
                loss.backward()


@on_ranks(3)
@torch.compiler.set_stance("force_eager")
def test_gradients_may_be_zeroed_in_each_way_on_ranks_that_have_none_of_them() -> None:
    def by_pieces(uneven: Uneven, zero: Callable[[nn.Parameter], Any]) -> None:
        for optimizer in uneven.optimizers:
            for piece in optimizer.param_groups[0]["params"]:
                zero(piece)

    ways: list[Callable[[Uneven], Any]] = [
        lambda uneven: uneven.model.zero_grad(),
        lambda uneven: uneven.model.zero_grad(set_to_none=False),
        lambda uneven: [optimizer.zero_grad(set_to_none=False) for optimizer in uneven.optimizers],
        lambda uneven: [parameter.grad.zero_() for parameter in uneven.model.parameters()],
        lambda uneven: [setattr(parameter, "grad", None) for parameter in uneven.model.parameters()],
        lambda uneven: by_pieces(uneven, lambda piece: setattr(piece, "grad", None)),
        lambda uneven: by_pieces(uneven, lambda piece: piece.grad.zero_()),
    ]
    ends = []
    for zero in ways:
        uneven = Uneven()
        for step in range(3):
            uneven.train(step, [])
            zero(uneven)
        ends.append(torch.cat([parameter.detach().flatten() for parameter in uneven.model.parameters()]))
        assert torch.equal(ends[0], ends[-1]) and equal_on_all_ranks(ends[-1])
