"""States of optimizers that step whole parameters: precision, checkpoints, other numbers of ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from in_ci import only
from models import loss_of
from oracle import CAP_MB, KINDS, Net, Pair, batch, matrices_and_others, said_by
from rank_pool import Ranks, on_ranks
from torch import nn
from torch.optim import Optimizer

from ddp_compile import (
    ddp_compile,
    load_sharded_optimizer_state_dict,
    shard_optimizer,
    sharded_optimizer_state_dict,
)


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_low_precision_states_to_master_weights() -> None:
    """From an unsharded run, before the first backward: tensors of other shapes, alone and in lists."""
    for make, settings in ((KINDS["adafactor"][0], {}), (whitening_in_float32, {"elementwise": False})):
        torch.manual_seed(1)
        module = Net().to(torch.bfloat16)
        unsharded = make(module)
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        for each in unsharded:
            each.step()
        model: Any = ddp_compile(copy.deepcopy(module), bucket_cap_mb=CAP_MB, backend="eager")
        optimizers = make(model)
        shard_optimizer(optimizers, model, master_weights=True, **settings)
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


@torch.compiler.set_stance("force_eager")
def saved(kind: str, dtype: torch.dtype, path: str) -> Any:
    pair = Pair(kind, dtype=dtype)
    for step in range(3):
        pair.train(step)
    states = [each.state_dict() for each in pair.optimizers], pair.model.state_dict()
    sharded = [sharded_optimizer_state_dict(each) for each in pair.optimizers]
    dcp.save({f"optimizer {i}": state for i, state in enumerate(sharded)}, checkpoint_id=path)
    return states


@torch.compiler.set_stance("force_eager")
def goes_on(kind: str, dtype: torch.dtype, states: Any, path: str, way: str) -> None:
    pair = Pair(kind, dtype=dtype)
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
    if dtype != torch.float32 and way != "at once":
        return  # where the loaded value is the present one, rounded, a master weight keeps its own
    for scheduler in (s for of_kind in pair.schedulers for s in of_kind):
        scheduler.step_size = 1000
    pair.train(8)
    pair.train(9)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    only([("muon", torch.bfloat16)], [*((kind, torch.float32) for kind in KINDS), ("muon", torch.bfloat16)]),
)
def test_resumes_on_another_number_of_ranks(ranks: Ranks, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    states = ranks(2).run(saved, kind, dtype, str(tmp_path))[0]
    for way in ("at once", "later", "dcp"):
        ranks(3).run(goes_on, kind, dtype, states, str(tmp_path), way)
