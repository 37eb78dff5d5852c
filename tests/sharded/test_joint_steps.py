"""Several sharded optimizers over one model, and parameters that one rank steps as a whole."""

from __future__ import annotations

import unittest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import loss_of
from oracle import CAP_MB, WIDTH, Net, Pair, batch, matrices_and_others, muon, said_by
from rank_pool import on_ranks
from torch import nn

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.runtime.sharded.owners import choose_owners

# Owners.


@on_ranks(3)
@torch.compiler.set_stance("force_eager")
def test_each_matrix_has_one_owner() -> None:
    pair = Pair("muon")
    pair.train(0)
    pair.train(1)
    matrices, _ = matrices_and_others(pair.reference)
    mine = [tuple(p.shape) for group in pair.optimizers[0].param_groups for p in group["params"] if p.dim() == 2]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    assert sorted(shape for shapes in of_all for shape in shapes) == sorted(tuple(p.shape) for p in matrices)
    assert max(map(len, of_all)) == 2  # five matrices on three ranks
    state = pair.optimizers[0].state
    assert sorted(tuple(each["momentum_buffer"].shape) for each in state.values()) == sorted(mine)


@on_ranks(3)
@torch.compiler.set_stance("force_eager")
def test_more_ranks_than_matrices() -> None:
    with unittest.TestCase().assertLogs("ddp_compile.runtime.sharded.owners") as logs:
        pair = Pair("muon", net=lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 3)))
    said = "Muon steps whole parameters: 1, 1, 0 on ranks 0 to 2; the rank with most to do has 2."
    (warned,) = logs.output
    assert f"rank {dist.get_rank()}: {said}" in warned
    for step in range(3):
        pair.train(step)
    assert said in str(pair.model.explain())


def test_the_layers_of_a_transformer_are_even() -> None:
    """Twelve layers of GPT's four matrices: the loads of 2 to 8 ranks are within 10 % of the mean."""
    width = 64
    shapes = 12 * [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    reduced = {id(parameter): number for number, parameter in enumerate(parameters)}
    for world_size in range(2, 9):
        owners = choose_owners([torch.optim.Muon(parameters)], reduced, world_size)
        assert owners.worst_of_mean <= 1.1, (world_size, owners.worst_of_mean)


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_elementwise_does_not_cut_muon_matrices() -> None:
    torch.manual_seed(1)
    model: Any = ddp_compile(Net(), bucket_cap_mb=CAP_MB, backend="eager")
    shard_optimizer(muon(model), model, elementwise=True)
    loss_of(model(batch(0))).backward()
    owned = [
        gradient for bucket in model.bucket_plan.buckets for gradient in bucket.gradients if gradient.owner is not None
    ]
    assert len(owned) == 5


# What is sent, and when.


@on_ranks(3)
@torch.compiler.set_stance("force_eager")
def test_optimizers_stepped_in_another_order() -> None:
    pair = Pair("muon", bucket_cap_mb=1e-5)  # a bucket for each parameter
    pair.train(0)
    for step in range(1, 5):
        loss_of(pair.model(batch(step))).backward()
        pair.follow()
        steps = [each.step for each in pair.optimizers]
        for each in steps if (step + dist.get_rank()) % 2 else reversed(steps):
            each()
        for each in pair.of_reference:
            each.step()
        pair.model.zero_grad()
        pair.compare()


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_collective_between_other_steps() -> None:
    torch.manual_seed(1)
    model: Any = ddp_compile(Net(), bucket_cap_mb=1e-5, backend="eager")
    parameters = list(model.parameters())
    optimizers = shard_optimizer([torch.optim.SGD(parameters[:2]), torch.optim.SGD(parameters[2:])], model)
    rank = dist.get_rank()
    loss_of(model(batch(0))).backward()
    optimizers[rank].step()  # rank 0 has started a gather, and rank 1 none
    told = f"RanksDifferError: rank {rank}: model.full_gradients() waits for all ranks, but on rank 1 another call"
    assert told in said_by(model.full_gradients)
    optimizers[1 - rank].step()
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model(batch(1)))).backward()
    named = f"gradients of SGD ({('first', 'norm')[rank]}.weight, ...) are finite waits for all ranks"
    assert named in said_by(lambda: scaler.step(optimizers[rank]))


# Half a step.


@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_missing_step_is_named(overlap: bool) -> None:
    pair = Pair("muon", overlap=overlap)
    pair.train(0)
    loss_of(pair.model(batch(1))).backward()
    muon, adamw = pair.optimizers
    muon.step()
    missing = "half a step: of the 2 optimizers that were sharded together, AdamW has not stepped"
    for call in (lambda: pair.model(batch(2)), muon.step, muon.state_dict, pair.model.state_dict, pair.model.unwrap):
        assert missing in said_by(call)
    held = pair.model.norm.weight
    assert missing in said_by(lambda: held.sum())
    adamw.step()
    loss = loss_of(pair.model(batch(2)))
    pair.model.zero_grad()
    loss.backward(retain_graph=True)
    muon.step()
    pair.model.zero_grad()
    said = said_by(loss.backward)  # torch may notice what was stepped
    assert missing in said or "modified by an inplace operation" in said


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_a_step_that_is_refused_has_not_begun() -> None:
    pair = Pair("muon")
    pair.train(0)
    with pair.model.no_sync():
        loss_of(pair.model(batch(1))).backward()
    assert "holds a local gradient" in said_by(pair.optimizers[0].step)
    pair.model.zero_grad()
    pair.train(2)


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_grad_scaler_skips_one_optimizer() -> None:
    pair = Pair("muon")
    pair.train(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(1, 5):
        first, infinite = step % 2, step > 2
        scaler.scale(loss_of(pair.model(batch(step)))).backward()
        left_out = pair.optimizers[first]
        if infinite and dist.get_rank() == 1:  # this rank's part of one parameter of one optimizer
            mine = [p for group in left_out.param_groups for p in group["params"] if p.numel()]
            mine[-1].grad.mul_(float("inf"))
        before = scaler.get_scale()
        for each in pair.optimizers:
            scaler.unscale_(each)
        pair.follow()
        for each in pair.optimizers:
            scaler.step(each)
        scaler.update()
        for number, each in enumerate(pair.of_reference):
            if not (infinite and number == first):
                each.step()
        assert (scaler.get_scale() < before) == infinite
        pair.model.zero_grad()
        pair.compare()
