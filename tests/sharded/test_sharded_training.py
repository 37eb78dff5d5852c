"""Sharded optimizers train as unsharded ones do. With two ranks, `fuzz.sharded` compares every optimizer of torch."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import flat_of, is_same_everywhere
from in_ci import only
from models import Mlp, loss_of
from oracle import KINDS, WIDTH, Pair, assert_trains_alike, batch, late_rank, make, plain, refused
from rank_pool import on_ranks
from torch import Tensor, nn

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.algorithms import GradientAllReduce


@pytest.mark.parametrize("world_size", only([3], [2, 3]))
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(eagerly=True)
def test_steps_are_those_of_unsharded_optimizers(kind: str, world_size: int) -> None:
    pair = Pair(kind, overlap=world_size == 2)
    model, optimizers = pair.model, pair.optimizers
    for step in range(8):
        pair.train(step, clips=step % 2 == 1)
    # Clipped, with an evaluation between, and zeroed one by one between the steps.
    loss_of(model(batch(3))).backward()
    model.clip_grad_norm_(1e-3)
    with torch.no_grad():
        model(batch(3))
    pair.follow()
    for each, theirs in zip(optimizers, pair.of_reference, strict=True):
        each.step()
        each.zero_grad()
        theirs.step()
    pair.compare()
    # Accumulated, without reductions and with them.
    for part in range(4):
        with model.no_sync() if part < 2 else contextlib.nullcontext():
            loss_of(model((part + 1) * batch(4))).backward()
    pair.follow()
    pair.step()
    model.zero_grad()
    pair.compare()
    # With a closure, called by the first.
    loss_of(model(batch(5))).backward()
    pair.follow()
    model.zero_grad()

    def compute() -> Tensor:
        loss = loss_of(model(batch(5)))
        loss.backward()
        return loss

    assert optimizers[0].step(compute) > 0
    for each in (*optimizers[1:], *pair.of_reference):
        each.step()
    model.zero_grad()
    pair.compare()
    # Written by a user between two steps.
    with torch.no_grad():
        for module in (model, pair.reference):
            module.first.weight.mul_(0.5)
            module.middle[1].weight.data = torch.full((33, 33), 0.01).t()
    pair.train(6)
    # Given back.
    model.unwrap()
    assert not pair.differences()
    loss_of(model(batch(7))).backward()
    assert model.first.weight.grad is not None


@pytest.mark.parametrize("backend", only(["aot_eager"], ["aot_eager", "inductor"]))
@pytest.mark.parametrize("kind", only(["adamw"], ["sgd, nesterov", "adamw", "adam, fused"]))
@on_ranks(2)
def test_compiled_steps(kind: str, backend: str) -> None:
    torch.compiler.reset()
    ends = []
    for sharded in (True, False):
        torch.manual_seed(1)
        model, optimizer = make(kind, Mlp(WIDTH, 2), sharded)
        if sharded:
            optimizer.step = torch.compile(optimizer.step, backend=backend)
        for step in range(3):
            plain(model, optimizer, step)
        loss_of(model(batch(3))).backward()
        optimizer.step()
        if sharded:  # after a compiled step as after any other
            with refused("reduced to shards"):
                optimizer.param_groups[0]["params"][0].grad.norm()
        ends.append(flat_of(model))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


@on_ranks(2, eagerly=True)
def test_master_weights() -> None:
    """What a user writes is stepped from."""
    pair = Pair("muon", dtype=torch.bfloat16)
    pair.train(0)
    pair.train(1)
    with torch.no_grad():
        for module in (pair.model, pair.reference):
            module.norm.weight.fill_(0.5)
    pair.train(2)
    pair.train(3)


def local_gradients_dropped(model: Any, optimizer: Any) -> None:
    for step in range(3):
        with model.no_sync():
            loss_of(100 * model(batch(step))).backward()
        optimizer.zero_grad(set_to_none=step != 1)
        plain(model, optimizer, step + 5)


def hooks_around_steps(model: Any, optimizer: Any) -> None:
    """One scales gradients, one averages parameters."""
    average: dict[Any, Tensor] = {p: p.detach().clone() for p in model.parameters()}

    def scale(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    def average_all(optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter, value in average.items():
            value.lerp_(parameter.detach(), 0.1)

    optimizer.register_step_pre_hook(scale)
    optimizer.register_step_post_hook(average_all)
    for step in range(4):
        with late_rank():
            plain(model, optimizer, step)
    with torch.no_grad():
        for parameter, value in average.items():
            parameter.copy_(value)


def forwards_between(model: Any, optimizer: Any) -> None:
    """Forwards without a backward between backward and step, and parameters that are left out of the step."""
    for step in range(4):
        loss_of(model(batch(step))).backward()
        first, *others = list(model.parameters())[: step + 1]
        for parameter in others:
            parameter.grad = None
        if step % 2:
            model(batch(step + 50))
        with model.no_sync():
            model(batch(step + 60))
        if step == 3:
            first.grad = None
        assert float(model.clip_grad_norm_(100.0)) > 0.0
        optimizer.step()
        optimizer.zero_grad()


def edits_after_a_forward(model: Any, optimizer: Any) -> None:
    """``.grad`` is dropped and zeroed after a forward, before its backward adds to what was reduced."""
    first, second, third, *others = model.parameters()
    for step in range(6):
        loss_of(model(batch(step))).backward()
        with model.no_sync() if step % 2 else contextlib.nullcontext():
            loss = loss_of(model(batch(step + 50)))
            first.grad.zero_()
            if step < 4:
                for parameter in (second, *(others if step < 2 else ())):
                    parameter.grad = None
            else:
                third.grad = torch.ones_like(third)
            loss.backward()
        if step % 2:
            loss_of(model(batch(step + 60))).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 == 0)


def zeroed_or_not(model: Any, optimizer: Any) -> None:
    """In all ways, after a step: zeros are stepped by, None is not. What is not zeroed is added to."""
    first, second, *_ = model.parameters()
    for step in range(7):
        loss_of(model(batch(step))).backward()
        if step == 4:
            first.grad.zero_()
        optimizer.step()
        if step == 2:
            for parameter in model.parameters():
                parameter.grad.zero_()
        elif step == 3:
            for parameter in model.parameters():
                parameter.grad = None
        elif step in (0, 4):
            model.zero_grad(set_to_none=False)
            second.grad = None
            optimizer.step()
            model.zero_grad(set_to_none=False)
        elif step != 5:
            optimizer.zero_grad(set_to_none=step != 1)


def backwards_without_forwards(model: Any, optimizer: Any) -> None:
    for step in range(3):
        loss = loss_of(model(batch(step)))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Chosen(Mlp):
    """Has as many layers as it is told."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4)

    def forward(self, x: Tensor, count: int = 4) -> Tensor:
        for layer in self.layers[:count]:
            x = layer(x).relu()
        return x


def unused_parameters(model: Any, optimizer: Any) -> None:
    """Reduced backwards, local ones and none, of which not all reach every parameter."""
    for step in range(4):
        loss_of(model(batch(step))).backward()
        if step == 1:
            for parameter in model.parameters():
                parameter.grad = None
        with model.no_sync():
            model(batch(step + 50), 1)
            loss_of(model(batch(step + 60), 2)).backward()
        if step == 2:
            model.zero_grad()
        loss_of(model(batch(step + 70), 3)).backward()
        optimizer.step()
        model.zero_grad()


def unwrapped_before_a_step(model: Any, optimizer: Any) -> None:
    """With local gradients beside, one gradient that was set to None, and one that was zeroed."""
    plain(model, optimizer, 0)
    loss_of(model(batch(1))).backward()
    parameters = list(model.parameters())
    parameters[3].grad = None
    parameters[4].grad.zero_()
    with model.no_sync():
        loss_of(model(batch(2 + dist.get_rank()), 2)).backward()
    model.unwrap()
    optimizer.step()


def undone_and_done_again(model: Any, optimizer: Any) -> None:
    sharded = type(model.comm_algorithm).__name__ == "ShardedAlgorithm"
    for step in range(6):
        plain(model, optimizer, step)
        if step in (1, 3):
            model.set_comm_algorithm(GradientAllReduce())
        elif step in (2, 4) and sharded:
            shard_optimizer(optimizer, model)


def steps_without_gradients(model: Any, optimizer: Any) -> None:
    """Before a backward, twice in a row, after zeroing; a part is frozen later."""
    optimizer.step()
    for step in range(5):
        loss_of(model(batch(step))).backward()
        optimizer.step()
        if step == 2:
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        if step == 3:
            model.layers[1].requires_grad_(False)


def given_a_slice(model: Any, optimizer: Any) -> None:
    first = model.layers[0].weight
    for step in range(3):
        plain(model, optimizer, step)
        first.data = torch.cat([first.data * 0.5] * 2, dim=1)[:, :WIDTH]


@on_ranks(2, eagerly=True)
def test_ordinary_code_trains_as_without_shards() -> None:
    assert_trains_alike(given_a_slice, tolerance=1e-6, kind="sgd")
    assert_trains_alike(local_gradients_dropped)
    assert_trains_alike(hooks_around_steps)
    assert_trains_alike(forwards_between)
    assert_trains_alike(edits_after_a_forward, tolerance=1e-6, kind="sgd")
    assert_trains_alike(zeroed_or_not, tolerance=1e-6, kind="sgd")
    assert_trains_alike(backwards_without_forwards, tolerance=1e-6, kind="sgd")
    assert_trains_alike(unused_parameters, Chosen, 1e-6, kind="sgd", find_unused_parameters=True)
    assert_trains_alike(unwrapped_before_a_step, Chosen, find_unused_parameters=True)
    assert_trains_alike(undone_and_done_again)
    assert_trains_alike(steps_without_gradients, find_unused_parameters=True)


@pytest.mark.parametrize("split", ["forward", "backward"])
@on_ranks(2)
def test_forwards_between_compiled(split: str) -> None:
    assert_trains_alike(forwards_between, backend="aot_eager", split=split)
    assert_trains_alike(edits_after_a_forward, tolerance=1e-6, kind="sgd", backend="aot_eager", split=split)


@on_ranks(3, eagerly=True)
def test_zeroing_on_ranks_without_pieces() -> None:
    """Each of the first two of three ranks owns a matrix, and the first one has all of the biases."""

    def by_pieces(zero: Any) -> None:
        for optimizer in optimizers:
            for piece in optimizer.param_groups[0]["params"]:
                zero(piece)

    ends = []
    ways = (
        lambda: model.zero_grad(set_to_none=False),
        lambda: [parameter.grad.zero_() for parameter in model.parameters()],
        lambda: [setattr(parameter, "grad", None) for parameter in model.parameters()],
        lambda: by_pieces(lambda piece: setattr(piece, "grad", None)),
        lambda: by_pieces(lambda piece: piece.grad.zero_()),
    )
    for zero in ways:
        torch.manual_seed(1)
        model: Any = ddp_compile(nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 3)), backend="eager")
        parameters = list(model.parameters())
        optimizers = [torch.optim.Muon(parameters[::2]), torch.optim.SGD(parameters[1::2], lr=0.1, momentum=0.9)]
        shard_optimizer(optimizers, model)
        for step in range(3):
            loss_of(model(batch(step))).backward()
            for optimizer in optimizers:
                optimizer.step()
            zero()
        ends.append(flat_of(model))
        assert torch.equal(ends[0], ends[-1]) and is_same_everywhere(ends[-1])
