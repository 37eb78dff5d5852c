"""Several sharded optimizers over one model, and parameters that one rank steps as a whole."""

import itertools
import unittest
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from beside import flat_of, own_batch
from models import loss_of
from oracle import CAP_MB, WIDTH, Net, Pair, batch, muon, said_by
from rank_pool import on_ranks
from torch import Tensor, nn

from ddp_compile import ddp_compile, shard_optimizer, torch_internals
from ddp_compile.runtime.comm.transfers import Transfer
from ddp_compile.runtime.sharded.cut import Cut
from ddp_compile.runtime.sharded.owners import choose_owners
from ddp_compile.runtime.sharded.transfers import ShardTransfers


@on_ranks(3, eagerly=True)
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


@on_ranks(2, eagerly=True)
def test_elementwise_does_not_cut_muon_matrices() -> None:
    torch.manual_seed(1)
    model: Any = ddp_compile(Net(), bucket_cap_mb=CAP_MB, backend="eager")
    shard_optimizer(muon(model), model, elementwise=True)
    loss_of(model(batch(0))).backward()
    owned = [g for bucket in model.bucket_plan.buckets for g in bucket.gradients if g.owner is not None]
    assert len(owned) == 5


@on_ranks(3, eagerly=True)
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


@on_ranks(2, eagerly=True)
def test_collective_between_other_steps() -> None:
    torch.manual_seed(1)
    model: Any = ddp_compile(Net(), bucket_cap_mb=1e-5, backend="eager")
    parameters = list(model.parameters())
    optimizers = shard_optimizer([torch.optim.SGD(parameters[:2]), torch.optim.SGD(parameters[2:])], model)
    rank = dist.get_rank()
    loss_of(model(batch(0))).backward()
    told = f"RanksDifferError: rank {rank}: model.{{}}() waits for all ranks, but on rank 1 another call"
    calls = {"clip_grad_norm_": lambda: model.clip_grad_norm_(1.0), "full_gradients": model.full_gradients}
    what, call = list(calls.items())[rank]
    assert told.format(what) in said_by(call)
    optimizers[rank].step()  # rank 0 has started a gather, and rank 1 none
    assert told.format("full_gradients") in said_by(model.full_gradients)
    optimizers[1 - rank].step()
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model(batch(1)))).backward()
    named = f"gradients of SGD ({('first', 'norm')[rank]}.weight, ...) are finite waits for all ranks"
    assert named in said_by(lambda: scaler.step(optimizers[rank]))


# Shards that travel by reduce-scatter and all-gather, as on NCCL: here over gloo, taken for another backend.


def train_with(collectives: bool) -> tuple[Tensor, list[list[bool]]]:
    """Parameters; and for each step, for each reduce-scatter of a padded bucket, whether it read it where it lies."""
    torch.manual_seed(0)
    layers = [nn.Linear(*pair) for pair in itertools.pairwise((7, 31, 29, 17, 1))]
    model = ddp_compile(nn.Sequential(*layers), bucket_cap_mb=0.001, backend="eager")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    launched: list[Tensor] = []
    in_place: list[list[bool]] = []
    launch, reduce_scatter = ShardTransfers.reduce_scatter, torch_internals.reduce_scatter_single

    def recorded_launch(self: ShardTransfers, flat: Tensor, cut: Cut) -> Transfer:
        launched.append(flat)
        return launch(self, flat, cut)

    def recorded(shard: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
        assert shard.nbytes % 16 == 0
        if whole.numel() > launched[-1].numel():
            in_place[-1].append(whole.data_ptr() == launched[-1].data_ptr())
        work: dist.Work = reduce_scatter(shard, whole, group)
        return work

    with (
        patch.object(ShardTransfers, "reduce_scatter", recorded_launch),
        patch.object(torch_internals, "reduce_scatter_single", recorded),
    ):
        with patch.object(torch_internals, "backend_name", lambda *_: "another") if collectives else nullcontext():
            optimizer = shard_optimizer(optimizer, model)
        for step in range(4):
            in_place.append([])
            optimizer.zero_grad()
            model(own_batch(step, 7)).square().mean().backward()
            optimizer.step()
    return flat_of(model), in_place


@on_ranks(3)
def test_no_step_copies_a_bucket() -> None:
    """Three ranks do not divide most buckets."""
    (ours, (first, *others)), (theirs, _) = train_with(True), train_with(False)
    assert first and not any(first)  # the first backward finds out which buckets there are
    assert all(of_step and all(of_step) for of_step in others)
    assert (ours - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2, eagerly=True)
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


@on_ranks(2, eagerly=True)
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
