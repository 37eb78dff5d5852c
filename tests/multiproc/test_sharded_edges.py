"""Sharded optimizers where ordinary code meets their edges: as without shards, or an error by name on every rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, loss_of
from rank_pool import RankFailure, RankPool, on_ranks
from test_sharded_optimizer import CAP_MB, OPTIMIZERS, WIDTH, batch, differences, groups_of, plain
from test_sharded_parameters import late_rank, make
from test_sharded_refusals import said_by
from torch import Tensor, nn

from ddp_compile import ddp_compile, shard_optimizer

Ranks = Callable[[int], RankPool]


def ends_of(
    train: Callable[[Any, Any], None], module: type[Mlp] | None = None, tolerance: float = 0.0, **settings: Any
) -> bool:
    """Whether some training ends with the same parameters with shards and without."""
    ends = []
    for sharded in (True, False):
        torch.manual_seed(2)
        model, optimizer = make(module=module and module(), sharded=sharded, **settings)
        train(model, optimizer)
        ends.append([p.detach().clone() for p in model.parameters()])
    return all(torch.allclose(*pair, rtol=0.0, atol=tolerance) for pair in zip(*ends, strict=True))


def dropped(model: Any, optimizer: Any) -> None:
    """What was accumulated locally is dropped by the optimizer."""
    for step in range(3):
        with model.no_sync():
            loss_of(100 * model(batch(step))).backward()
        optimizer.zero_grad(set_to_none=step != 1)
        plain(model, optimizer, step + 5)


def hooked(model: Any, optimizer: Any) -> None:
    """Hooks of others around the step, from before and from after: one scales gradients, one averages parameters."""
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


class Teacher(Mlp):
    """Now and then its forward is one graph that reads parameters and gives them no gradients."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, teaches: bool = False) -> Tensor:
        if teaches:
            for layer in self.layers:
                x = nn.functional.linear(x, layer.weight.detach())
            return x
        return self.scale * super().forward(x)


def taught(model: Any, optimizer: Any) -> None:
    for step in range(5):
        target = model(batch(step), teaches=True).detach() if step else 0.0
        (model(batch(step)) - target).square().mean().backward()
        with late_rank():
            optimizer.step()
        optimizer.zero_grad()


def clamped(model: Any, optimizer: Any) -> None:
    """As WGAN does it: what is written by ``.data`` stays."""
    for step in range(4):
        plain(model, optimizer, step)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.05, 0.05)


def measured(model: Any, optimizer: Any) -> None:
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


def edited_after_a_forward(model: Any, optimizer: Any) -> None:
    """``.grad`` is set and zeroed after a forward, before its backward adds to what was reduced."""
    first, second, third, *others = model.parameters()
    for step in range(6):
        loss_of(model(batch(step))).backward()
        with model.no_sync() if step % 2 else nullcontext():
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


def zeroed(model: Any, optimizer: Any) -> None:
    """In all ways, after a step: zeros are stepped by, None is not."""
    first, second, *_ = model.parameters()
    for step in range(6):
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
        else:
            optimizer.zero_grad(set_to_none=step != 1)


class Chosen(Mlp):
    """Has as many layers as it is told."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4)

    def forward(self, x: Tensor, count: int = 4) -> Tensor:
        for layer in self.layers[:count]:
            x = layer(x).relu()
        return x


def added_up(model: Any, optimizer: Any) -> None:
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


def given_back(model: Any, optimizer: Any) -> None:
    """Between backward and step, with gradients of this rank alone beside, and one that was set to None."""
    plain(model, optimizer, 0)
    loss_of(model(batch(1))).backward()
    list(model.parameters())[3].grad = None
    with model.no_sync():
        loss_of(model(batch(2 + dist.get_rank()), 2)).backward()
    model.unwrap()
    optimizer.step()


def same_as_without() -> dict[str, bool]:
    torch.manual_seed(3)
    teacher = Teacher()
    return {
        "dropped": ends_of(dropped),
        "hooked": ends_of(hooked),
        "taught": all(map(torch.equal, *[trained_teacher(teacher, sharded) for sharded in (True, False)])),
        "clamped": ends_of(clamped),
        "measured": ends_of(measured),
        "measured, launched inside of compiled backwards": ends_of(measured, backend="aot_eager"),
        "edited": ends_of(edited_after_a_forward, tolerance=1e-6, kind="sgd"),
        **{
            f"edited, {split}": ends_of(
                edited_after_a_forward, tolerance=1e-6, kind="sgd", backend="aot_eager", split=split
            )
            for split in ("forward", "backward")
        },
        "zeroed": ends_of(zeroed),
        "added up": ends_of(added_up, Chosen, 1e-6, kind="sgd", find_unused_parameters=True),
        "given back": ends_of(given_back, Chosen, find_unused_parameters=True),
    }


def trained_teacher(teacher: nn.Module, sharded: bool) -> list[Tensor]:
    model, optimizer = make(module=copy.deepcopy(teacher), sharded=sharded, backend="aot_eager")
    taught(model, optimizer)
    return [p.detach().clone() for p in model.parameters()]


def test_ordinary_code_trains_as_without_shards(ranks: Ranks) -> None:
    for same in ranks(2).run(same_as_without):
        assert all(same.values()), same


@torch.compiler.set_stance("force_eager")
def numbers(kind: str) -> float:
    """Of a model with a parameter of no dimension, saved and loaded."""
    ends = []
    for sharded in (True, False):
        torch.manual_seed(3)
        model: Any = ddp_compile(Teacher(), bucket_cap_mb=CAP_MB, backend="eager")
        optimizer = OPTIMIZERS[kind](groups_of(model))
        if sharded:
            shard_optimizer(optimizer, model)
        for step in range(4):
            plain(model, optimizer, step)
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        ends.append(([p.detach().clone() for p in model.parameters()], optimizer.state_dict()))
    return differences(*ends)


def test_parameters_without_dimensions(ranks: Ranks) -> None:
    for kind in ("adagrad", "adamw", "adamw foreach", "rprop"):
        assert ranks(2).run(numbers, kind) == [0.0, 0.0], kind


@torch.compiler.set_stance("force_eager")
def low_precision() -> list[bool]:
    """Pieces in float32, of parameters in bfloat16: written by ``.data``, saved, loaded, undone."""
    model, optimizer = make(module=Mlp(WIDTH, 3).to(torch.bfloat16), sharded=False)
    shard_optimizer(optimizer, model, master_weights=True)

    def step(model: Any, optimizer: Any, number: int) -> None:
        loss_of(model(batch(number).bfloat16())).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(2):
        step(model, optimizer, number)
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    optimizer.step()
    kept = all((p == 7.0).all() for p in model.parameters())
    saved = copy.deepcopy(optimizer.state_dict())
    step(model, optimizer, 2)
    other, other_optimizer = make(module=Mlp(WIDTH, 3).to(torch.bfloat16), sharded=False)
    shard_optimizer(other_optimizer, other, master_weights=True)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7.0)
    other_optimizer.load_state_dict(saved)
    step(other, other_optimizer, 2)
    resumed = all(map(torch.equal, model.parameters(), other.parameters()))
    model.unwrap()
    model = ddp_compile(model, backend="eager")
    step(model, optimizer, 3)
    return [bool(kept), resumed]


def test_master_weights_through_edits_checkpoints_and_unwrapping(ranks: Ranks) -> None:
    assert ranks(2).run(low_precision) == [[True, True], [True, True]]


# Errors.


@torch.compiler.set_stance("force_eager")
def skips_one() -> str:
    """Rank 1 leaves a step out and goes on."""
    model, optimizer = make()
    for step in range(8):
        loss_of(model(batch(step))).backward()
        if step != 3 or dist.get_rank() == 0:
            optimizer.step()
        optimizer.zero_grad()
    return "nobody noticed"


def test_a_rank_that_leaves_out_one_step_is_an_error_on_both(ranks: Ranks) -> None:
    for said in ranks(2).run_expecting_failures(skips_one, timeout_s=2.0):
        assert isinstance(said, RankFailure) and said.kind == "ReductionError", said


def _raise(_gradient: Any) -> None:
    raise KeyError("bad sample")


@torch.compiler.set_stance("force_eager")
def ends() -> dict[str, Any]:
    """What is left of the optimizer when the model is given back, early and late, and what copies do."""
    found: dict[str, Any] = {}
    model, optimizer = make()
    model.unwrap()
    loss_of(model(batch(0))).backward()
    optimizer.step()
    found["unwrapped before a backward"] = "step" not in vars(optimizer) and "zero_grad" not in vars(optimizer)

    tied = Mlp(WIDTH, 2)
    tied.layers[1].weight.data = tied.layers[0].weight.data
    found["one storage"] = said_by(lambda: make(module=tied))

    sparse = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    replicated: Any = ddp_compile(sparse, backend="eager")
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
    found["sparse"] = said_by(lambda: shard_optimizer(optimizer, replicated))
    replicated(torch.tensor([1, 2])).sum().backward()
    optimizer.step()  # as before

    model, optimizer = make()
    for step in range(2):
        plain(model, optimizer, step)
    found["copied"] = said_by(lambda: copy.deepcopy(optimizer))
    found["pickled"] = said_by(lambda: pickle.dumps(optimizer))
    plain(model, optimizer, 2)
    found["classes of a copy"] = {type(p) for p in copy.deepcopy(model).parameters()} == {nn.Parameter}
    assert optimizer.state[next(model.parameters())] == {}
    found["state_dict after a look"] = sorted(optimizer.state_dict()["state"]) == list(range(8))
    loss_of(model(batch(3))).backward()
    found["isfinite"] = said_by(lambda: torch.isfinite(optimizer.param_groups[0]["params"][0].grad))

    model, optimizer = make()
    plain(model, optimizer, 0)
    model.layers[0].weight.register_hook(_raise)  # others have come by then
    with pytest.raises((KeyError, RuntimeError)):
        loss_of(model(batch(1))).backward()
    model.unwrap()
    found["unwrapped after an error"] = said_by(optimizer.step)
    return found


def test_what_becomes_of_the_optimizer(ranks: Ranks) -> None:
    for found in ranks(2).run(ends):
        for key in ("unwrapped before a backward", "classes of a copy", "state_dict after a look"):
            assert found[key] is True, key
        assert (
            "parameters lie in one storage, and would not any more: layers.0.weight, layers.1.weight"
            in found["one storage"]
        )
        assert "takes no sparse gradients" in found["sparse"]
        assert "cannot be copied or pickled" in found["copied"] and "cannot be copied or pickled" in found["pickled"]
        assert "isfinite of gradients that are reduced to shards would be that of this rank's part" in found["isfinite"]
        assert "was sharded for a model that has been unwrapped after an error" in found["unwrapped after an error"]


@torch.compiler.set_stance("force_eager")
def edits_of_groups() -> tuple[list[str], bool]:
    model, optimizer = make()
    group = optimizer.param_groups[0]
    said = []
    if dist.get_rank() == 1:
        del group["params"][0]
    said.append(said_by(loss_of(model(batch(0))).backward))
    ends = []
    for edits in (True, False):
        model, optimizer = make()
        group = optimizer.param_groups[0]
        num_whole = len(group["params"])
        for step in range(3):
            loss_of(model(batch(step))).backward()
            if edits and step < 2:
                kept = list(group["params"])
                if step == 0:
                    group["params"] = kept[1:]
                else:
                    group["params"].clear()
                said += [said_by(optimizer.step), said_by(optimizer.state_dict)]
                group["params"] = kept
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.detach().clone() for p in model.parameters()])
    group["params"] = group["params"][1:]
    with pytest.warns(UserWarning, match=r"this is undone: group"):
        model.unwrap()
    assert len(group["params"]) == len(optimizer.param_groups[0]["params"]) == num_whole
    return said, all(map(torch.equal, *ends))


def test_edits_of_groups_are_refused_by_name(ranks: Ranks) -> None:
    for rank, (said, goes_on) in enumerate(ranks(2).run(edits_of_groups)):
        for place, text in enumerate(said):
            assert f'ReplicationError: rank {rank if place else 1}: group["params"]' in text
            assert "Put back what was there; to leave parameters out" in text
        assert len(said) == 5 and goes_on


@pytest.mark.parametrize(("is_gone", "stay"), [(False, 0), (True, 2)])
@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_unwrapping_destroys_its_process_groups_if_that_of_the_model_is_still_there(is_gone: bool, stay: int) -> None:
    groups = dist.distributed_c10d._world.pg_map
    before = set(groups)
    own = dist.new_group()
    model, optimizer = make(process_group=own)
    assert len(set(groups) - before) == 3
    plain(model, optimizer, 0)
    model.await_parameters()
    dist.barrier()  # the other rank may still be sending over it
    if is_gone:
        dist.destroy_process_group(own)
    model.unwrap()
    assert len(set(groups) - before - {own}) == stay
    dist.barrier()
