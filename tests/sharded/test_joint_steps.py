"""Several sharded optimizers over one model, and parameters that one rank steps as a whole."""

from __future__ import annotations

import copy
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
from ddp_compile.runtime.comm.transfers import Transfer

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
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 3))
    reference = copy.deepcopy(module)
    model: Any = ddp_compile(module, backend="eager")
    optimizers, of_reference = muon(model)[:1], muon(reference)[:1]
    others = matrices_and_others(model)[1]
    optimizers.append(torch.optim.SGD(others, lr=0.1))
    of_reference.append(torch.optim.SGD(matrices_and_others(reference)[1], lr=0.1))
    with unittest.TestCase().assertLogs("ddp_compile.runtime.sharded.owners") as logs:
        shard_optimizer(optimizers, model)
    (warned,) = logs.output
    assert f"rank {dist.get_rank()}: Muon steps whole parameters: 1, 1, 0 on ranks 0 to 2; the rank with" in warned
    for step in range(3):
        loss_of(model(batch(step))).backward()
        gradients = model.full_gradients()
        for name, parameter in reference.named_parameters():
            parameter.grad = gradients[name]
        for each in (*optimizers, *of_reference):
            each.step()
        model.zero_grad()
        assert all(map(torch.equal, model.parameters(), reference.parameters()))
    assert "Muon steps whole parameters: 1, 1, 0 on ranks 0 to 2; the rank with most to do has 2." in str(
        model.explain()
    )


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
def test_step_gathers_once_without_waiting() -> None:
    pair = Pair("muon")
    pair.train(0)
    loss_of(pair.model(batch(1))).backward()
    waits, transfers = [], pair.model.comm_algorithm._transfers
    gathers, all_gather = [], transfers.all_gather
    with pytest.MonkeyPatch.context() as patch:
        for function in ("all_reduce", "broadcast", "all_gather_object", "all_to_all_single"):
            patch.setattr(dist, function, lambda *_args, **_options: waits.append(1))
        patch.setattr(Transfer, "wait", lambda _transfer: waits.append(1))
        patch.setattr(transfers, "all_gather", lambda flat, cut: gathers.append(1) or all_gather(flat, cut))
        for each in pair.optimizers:
            each.step()
    assert not waits and len(gathers) == len(pair.model.bucket_plan.buckets) > 2
    pair.model.await_parameters()


@on_ranks(3)
@torch.compiler.set_stance("force_eager")
def test_optimizers_stepped_in_another_order() -> None:
    pair = Pair("muon", bucket_cap_mb=1e-5)  # a bucket for each parameter
    pair.train(0)
    transfers, order = pair.model.comm_algorithm._transfers, []
    all_gather = transfers.all_gather
    transfers.all_gather = lambda flat, cut: order.append(cut) or all_gather(flat, cut)
    buckets = [bucket.cut for bucket in reversed(pair.model.comm_algorithm.sharding.buckets)]
    for step in range(1, 5):
        loss_of(pair.model(batch(step))).backward()
        pair.follow()
        order.clear()
        steps = [each.step for each in pair.optimizers]
        for each in steps if (step + dist.get_rank()) % 2 else reversed(steps):
            each()
        assert order == buckets
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
