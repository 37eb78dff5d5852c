"""Several sharded optimizers over one model, and parameters that one rank steps as a whole.

The reference is a plain module on each rank, whose unsharded optimizers step by the reduced gradients of the sharded
model: its parameters have to have the same bits after each step, on any number of ranks.
"""

from __future__ import annotations

import contextlib
import copy
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import loss_of
from rank_pool import RankPool, on_ranks
from test_sharded_refusals import said_by
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_compile import (
    ddp_compile,
    load_sharded_optimizer_state_dict,
    shard_optimizer,
    sharded_optimizer_state_dict,
)
from ddp_compile.runtime.comm.transfers import Transfer

Ranks = Callable[[int], RankPool]
CAP_MB = 0.004
WIDTH = 19


class Net(nn.Module):
    """Matrices of several shapes, one of them transposed in memory, and parameters that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 33)
        self.norm = nn.LayerNorm(33)
        self.middle = nn.ModuleList(nn.Linear(33, 33) for _ in range(3))
        self.middle[1].weight.data = self.middle[1].weight.data.t().contiguous().t()
        self.last = nn.Linear(33, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        for layer in self.middle:
            x = x + torch.tanh(layer(x))
        return self.last(x)


class Whitening(Optimizer):
    """As users write them: a step of a matrix needs all of it, and its states are lists of other matrices."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    assert p.dim() == 2
                    state = self.state[p]
                    if not state:
                        state["sides"] = [torch.eye(size, dtype=p.dtype) for size in p.shape]
                        state["count"] = 0
                    left, right = state["sides"]
                    left.lerp_(p.grad @ p.grad.t(), 0.1)
                    right.lerp_(p.grad.t() @ p.grad, 0.1)
                    state["count"] += 1
                    p.sub_(group["lr"] * torch.linalg.solve(left, p.grad) @ torch.linalg.inv(right))
        return loss


def matrices_and_others(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [p for p in module.parameters() if p.dim() == 2]
    return matrices, [p for p in module.parameters() if p.dim() != 2]


def muon(module: nn.Module) -> list[Optimizer]:
    matrices, others = matrices_and_others(module)
    groups = [{"params": matrices[:2], "lr": 0.03}, {"params": matrices[2:]}]
    return [torch.optim.Muon(groups, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def two_of_torch(module: nn.Module) -> list[Optimizer]:
    matrices, others = matrices_and_others(module)
    return [torch.optim.SGD(others, lr=0.1, momentum=0.9), torch.optim.AdamW(matrices, lr=0.01, fused=True)]


def whitening(module: nn.Module) -> list[Optimizer]:
    matrices, others = matrices_and_others(module)
    return [torch.optim.SGD(others, lr=0.1), Whitening(matrices)]


KINDS: dict[str, tuple[Callable[[nn.Module], list[Optimizer]], dict[str, Any]]] = {
    "muon": (muon, {}),
    "adafactor": (lambda module: [torch.optim.Adafactor(module.parameters(), lr=0.02)], {}),
    "two": (two_of_torch, {}),
    "whitening": (whitening, {"placement": "whole"}),
}


def batch(step: int) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    return torch.randn(6, WIDTH)


class Pair:
    """A sharded model, and a module that follows its gradients with unsharded optimizers."""

    def __init__(self, kind: str, sharded: bool = True, **settings: Any) -> None:
        torch.manual_seed(1)
        make, of_kind = KINDS[kind]
        module = Net()
        self.reference = copy.deepcopy(module)
        settings = {"backend": "eager", "split": "backward"} | settings
        overlap = settings.pop("overlap", True)
        self.model: Any = ddp_compile(module, bucket_cap_mb=CAP_MB, **settings)
        self.optimizers = make(self.model)
        if sharded:
            assert shard_optimizer(self.optimizers, self.model, overlap=overlap, **of_kind) == self.optimizers
        self.of_reference = make(self.reference)
        self.schedulers = [
            [torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in of_kind]
            for of_kind in (self.optimizers, self.of_reference)
        ]

    def follow(self) -> None:
        """Give the reference the reduced gradients."""
        gradients = self.model.full_gradients()
        for name, parameter in self.reference.named_parameters():
            parameter.grad = gradients.get(name)

    def step(self) -> None:
        for each in (*self.optimizers, *self.of_reference):
            each.step()
        for of_kind in self.schedulers:
            for scheduler in of_kind:
                scheduler.step()

    def train(self, step: int) -> None:
        loss_of(self.model(batch(step))).backward()
        self.follow()
        self.step()
        for each in self.optimizers:
            each.zero_grad()
        self.compare()

    def compare(self) -> None:
        pairs = zip(self.model.named_parameters(), self.reference.parameters(), strict=True)
        different = [name for (name, mine), theirs in pairs if not torch.equal(mine, theirs)]
        assert not different, different
        assert not self.differences()

    def differences(self) -> list[str]:
        """Names of the states that differ; called on every rank."""
        found = []
        for mine, theirs in zip(self.optimizers, self.of_reference, strict=True):
            states = mine.state_dict(), theirs.state_dict()
            found += [f"{type(mine).__name__}: {path}" for path in unequal(*states)]
        return found


def unequal(mine: Any, theirs: Any, path: str = "") -> list[str]:
    if isinstance(theirs, Tensor):
        is_same = isinstance(mine, Tensor) and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        return [] if is_same and mine.stride() == theirs.stride() else [path]
    if isinstance(theirs, dict):
        if mine.keys() != theirs.keys():
            return [path]
        return [each for key in theirs for each in unequal(mine[key], theirs[key], f"{path}/{key}")]
    if isinstance(theirs, list | tuple):
        if len(mine) != len(theirs):
            return [path]
        return [each for i in range(len(theirs)) for each in unequal(mine[i], theirs[i], f"{path}/{i}")]
    return [] if mine == theirs else [path]


@torch.compiler.set_stance("force_eager")
def trained_in_all_ways(kind: str, overlap: bool) -> None:
    pair = Pair(kind, overlap=overlap)
    model, optimizers = pair.model, pair.optimizers
    for step in range(3):
        pair.train(step)
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


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_states_are_those_of_unsharded_optimizers(ranks: Ranks, kind: str, world_size: int) -> None:
    ranks(world_size).run(trained_in_all_ways, kind, world_size == 2)


def trained_compiled(kind: str, split: str) -> bool:
    pair = Pair(kind, split=split, backend="aot_eager")
    for step in range(4):
        pair.train(step)
    return "part by part" in pair.model.explain()


@pytest.mark.parametrize("split", ["forward", "backward"])
def test_compiled_forwards_wait_part_by_part(ranks: Ranks, split: str) -> None:
    assert all(ranks(2).run(trained_compiled, "muon", split))


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_low_precision_is_stepped_in_float32_with_master_weights() -> None:
    torch.manual_seed(1)
    module = Net().to(torch.bfloat16)
    reference = copy.deepcopy(module).float()
    model: Any = ddp_compile(module, bucket_cap_mb=CAP_MB, backend="eager")
    optimizers, of_reference = muon(model), muon(reference)
    shard_optimizer(optimizers, model, master_weights=True)
    for step in range(4):
        loss_of(model(batch(step).to(torch.bfloat16)).float()).backward()
        gradients = model.full_gradients()
        for name, parameter in reference.named_parameters():
            parameter.grad = gradients[name].float()
        for each in (*optimizers, *of_reference):
            each.step()
        model.zero_grad()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine, theirs.to(torch.bfloat16))


# Owners.


@on_ranks(3)
@torch.compiler.set_stance("force_eager")
def test_each_matrix_has_one_owner_and_its_states_are_there_alone() -> None:
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


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_a_cost_of_users_decides_who_owns_what() -> None:
    pair = Pair("muon", sharded=False)
    heavy = pair.model.last.weight
    shard_optimizer(pair.optimizers, pair.model, cost=lambda p: 100.0 if p is heavy else 1.0)
    pair.train(0)
    owned = {g.fqn: g.owner for bucket in pair.model.bucket_plan.buckets for g in bucket.gradients}
    assert [name for name, owner in owned.items() if owner == owned["last.weight"]] == ["last.weight"]
    assert owned["first.bias"] is None


@on_ranks(3)
@torch.compiler.set_stance("force_eager")
def test_more_ranks_than_matrices_train_and_are_told() -> None:
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
    assert f"rank {dist.get_rank()}: Muon steps 2 whole parameters on 3 ranks. Rank 0 has 2." in warned
    assert "and 1 ranks nothing" in warned
    for step in range(3):
        loss_of(model(batch(step))).backward()
        gradients = model.full_gradients()
        for name, parameter in reference.named_parameters():
            parameter.grad = gradients[name]
        for each in (*optimizers, *of_reference):
            each.step()
        model.zero_grad()
        assert all(map(torch.equal, model.parameters(), reference.parameters()))
    assert "Muon steps whole parameters: 1, 1, 0 on ranks 0 to 2; the rank with most to do has 2." in model.explain()


# What is sent, and when.


@on_ranks(3)
@torch.compiler.set_stance("force_eager")
def test_a_step_waits_for_nobody_and_a_bucket_is_gathered_once() -> None:
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


# Half a step.


@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_an_optimizer_that_has_not_stepped_is_named(overlap: bool) -> None:
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
    assert "a gradient of this rank alone" in said_by(pair.optimizers[0].step)
    pair.model.zero_grad()
    pair.train(2)


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_a_grad_scaler_may_leave_out_the_step_of_one_of_them() -> None:
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


# Checkpoints.


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_states_of_low_precision_come_into_master_weights() -> None:
    """From an unsharded run, before the first backward: tensors of other shapes, alone and in lists."""
    for make, settings in ((KINDS["adafactor"][0], {}), (whitening_in_float32, {"placement": "whole"})):
        torch.manual_seed(1)
        module = Net().to(torch.bfloat16)
        unsharded = make(module)
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        for each in unsharded:
            each.step()
        model: Any = ddp_compile(copy.deepcopy(module), bucket_cap_mb=CAP_MB, backend="eager")
        optimizers = make(model)
        shard_optimizer(optimizers, model, master_weights=True, elementwise=False, **settings)
        for mine, theirs in zip(optimizers, unsharded, strict=True):
            mine.load_state_dict(theirs.state_dict())
        for step in range(2):
            loss_of(model(batch(step).to(torch.bfloat16)).float()).backward()
            for each in optimizers:
                each.step()
            model.zero_grad()
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def whitening_in_float32(module: nn.Module) -> list[Optimizer]:
    matrices, others = matrices_and_others(module)
    return [torch.optim.SGD(others, lr=0.1), Running(matrices)]


class Running(Optimizer):
    """Keeps a mean of the gradients' squares in float32, in a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                (squares,) = self.state[p].setdefault("means", [torch.ones(p.shape[1])])
                assert squares.dtype == torch.float32
                squares.lerp_(p.grad.float().square().mean(0), 0.1)
                p.sub_((0.01 * p.grad / squares.sqrt()).to(p.dtype))


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_a_state_of_no_parameter_is_refused() -> None:
    pair = Pair("muon")
    pair.train(0)
    pair.optimizers[0].state["count"] = 7
    assert "Muon has the state 'count', which belongs to no parameter" in said_by(pair.optimizers[0].state_dict)


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_a_promise_for_others_does_not_cut_what_is_known_to_need_whole_parameters() -> None:
    torch.manual_seed(1)
    model: Any = ddp_compile(Net(), bucket_cap_mb=CAP_MB, backend="eager")
    shard_optimizer(muon(model), model, elementwise=True)
    loss_of(model(batch(0))).backward()
    owned = [
        gradient for bucket in model.bucket_plan.buckets for gradient in bucket.gradients if gradient.owner is not None
    ]
    assert len(owned) == 5


@torch.compiler.set_stance("force_eager")
def saved(kind: str, path: str) -> Any:
    pair = Pair(kind)
    for step in range(3):
        pair.train(step)
    states = [each.state_dict() for each in pair.optimizers], pair.model.state_dict()
    sharded = [sharded_optimizer_state_dict(each) for each in pair.optimizers]
    dcp.save({f"optimizer {i}": state for i, state in enumerate(sharded)}, checkpoint_id=path)
    return states


@torch.compiler.set_stance("force_eager")
def goes_on(kind: str, states: Any, path: str, way: str) -> None:
    pair = Pair(kind)
    of_optimizers, of_model = copy.deepcopy(states)  # the ranks share the memory of what they are called with
    if way != "at once":
        pair.train(7)
    pair.model.load_state_dict(of_model)
    pair.reference.load_state_dict(of_model)
    for each, state in zip(pair.of_reference, of_optimizers, strict=True):
        each.load_state_dict(state)
    if way == "dcp":
        sharded = {f"optimizer {i}": sharded_optimizer_state_dict(each) for i, each in enumerate(pair.optimizers)}
        dcp.load(sharded, checkpoint_id=path)
        for number, each in enumerate(pair.optimizers):
            load_sharded_optimizer_state_dict(each, sharded[f"optimizer {number}"])
    else:
        for each, state in zip(pair.optimizers, of_optimizers, strict=True):
            each.load_state_dict(state)
    if way != "at once":
        assert not (found := pair.differences()), found
    for scheduler in (s for of_kind in pair.schedulers for s in of_kind):
        scheduler.step_size = 1000
    pair.train(8)
    pair.train(9)


@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_ranks_goes_on_from_a_checkpoint(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    states = ranks(2).run(saved, kind, str(tmp_path))[0]
    for way in ("at once", "later", "dcp"):
        ranks(3).run(goes_on, kind, states, str(tmp_path), way)
