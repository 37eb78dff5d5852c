"""DiLoCo, compared with one process that has all ranks and ``torch.optim.SGD`` for the outer optimizer."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from averages import Simulation, error_of, make_adamw, make_model, train_step
from beside import flat_of, is_same_everywhere, of_all_ranks
from in_ci import only
from rank_pool import on_ranks
from torch import Tensor, nn

from ddp_compile import ReductionError, ReplicationError, ddp_compile
from ddp_compile.algorithms import DiLoCo

STEPS = 10
ALL = DiLoCo(sync_every=4, fragments=2, fragment_sync_delay=3, fragment_update_alpha=0.25, outer_lr=0.5)
CASES = {
    "whole": DiLoCo(sync_every=3),
    "fragments": DiLoCo(sync_every=5, fragments=3),
    "delay": DiLoCo(sync_every=3, fragments=2, fragment_sync_delay=2, fragment_update_alpha=0.3),
    "bfloat16": DiLoCo(sync_every=2, wire_dtype=torch.bfloat16),
    "all of it": ALL,
    "after warm-up": DiLoCo(sync_every=2, fragments=3, warmup_steps=2),
}


class Part(NamedTuple):
    """A fragment: its place in the flat parameters, the step that sends it, and the outer optimizer."""

    where: slice
    offset: int
    outer: nn.Parameter
    optimizer: torch.optim.Optimizer


def parts_of(module: nn.Module, config: DiLoCo) -> list[Part]:
    """Fragments of whole parameters; a new one begins once its share of all values has been passed."""
    numels = [p.numel() for p in module.parameters()]
    share, ends, seen = sum(numels) / config.fragments, [], 0
    for numel in numels:
        seen += numel
        if seen >= share * (len(ends) + 1):
            ends.append(seen)
    assert len(ends) == config.fragments
    flat, parts = flat_of(module), []
    for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        outer = nn.Parameter(flat[begin:end].clone())
        optimizer = torch.optim.SGD([outer], lr=config.outer_lr, momentum=config.outer_momentum, nesterov=True)
        offset = (number + 1) * config.sync_every // config.fragments
        parts.append(Part(slice(begin, end), offset, outer, optimizer))
    return parts


def mean_of(deltas: list[Tensor], wire_dtype: torch.dtype) -> Tensor:
    size = len(deltas)
    dtype = wire_dtype if size > 1 else torch.float32
    return torch.stack([(delta / size).to(dtype) for delta in deltas]).sum(0).float()


def simulate(simulation: Simulation, config: DiLoCo) -> Iterator[list[Part]]:
    parts, under_way = parts_of(simulation.models[0], config), {}
    for step in range(STEPS):
        simulation.compute_gradients(step)
        if step < config.warmup_steps:
            simulation.average_gradients()
            simulation.step()
            parts = parts_of(simulation.models[0], config)
            yield parts
            continue
        simulation.step()
        flats = simulation.flats()
        for number, part in enumerate(parts):
            since = step + 1 - config.warmup_steps - part.offset
            if since >= 0 and since % config.sync_every == 0:
                deltas = [part.outer.detach() - flat[part.where] for flat in flats]
                under_way[number] = mean_of(deltas, config.wire_dtype)
            if since >= 0 and since % config.sync_every == config.fragment_sync_delay and number in under_way:
                part.outer.grad = under_way.pop(number)
                part.optimizer.step()
                for flat in flats:
                    flat[part.where] = torch.lerp(part.outer.detach(), flat[part.where], config.fragment_update_alpha)
        for rank, flat in enumerate(flats):
            simulation.set(rank, flat)
        yield parts


# The order in which more than two ranks are added up decides how sums in bfloat16 are rounded.
EVERYWHERE = [(name, size) for name in CASES for size in ((1, 2) if name == "bfloat16" else (1, 2, 3, 4))]
IN_CI = [("fragments", 3), ("bfloat16", 2), ("all of it", 3), ("after warm-up", 3)]


@pytest.mark.parametrize(("name", "world_size"), only(IN_CI, EVERYWHERE))
@on_ranks(eagerly=True)
def test_steps_match_simulation(name: str, world_size: int) -> None:
    """Looked at right after the optimizer's step. What the outer optimizer keeps is the same on every rank, bit by
    bit."""
    config, rank = CASES[name], dist.get_rank()
    model, optimizer = make_model(config)
    simulation = Simulation(copy.deepcopy(model), world_size)
    begin = flat_of(model)
    for step, parts in enumerate(simulate(simulation, config)):
        train_step(model, optimizer, step)
        expected = flat_of(simulation.models[rank])
        assert (flat_of(model) - expected).abs().max() < 2e-6 * expected.abs().max(), step
        if step in (3, STEPS - 1):  # the others do not receive early
            kept = model.comm_algorithm.state_dict()["fragments"]
            outer, momentum = (torch.cat([f for each in kept for f in each[key]]) for key in ("before", "momentum"))
            assert is_same_everywhere(outer) and is_same_everywhere(momentum)
            assert (outer - torch.cat([part.outer.detach() for part in parts])).abs().max() < 2e-6
    assert (outer - begin).count_nonzero() > 1000


@pytest.mark.parametrize("by", ["itself", "a module around it"])
@on_ranks(2, eagerly=True)
def test_loaded_parameters_begin_anew(by: str) -> None:
    """Each rank loads its own of the middle of a cycle; without the state of the algorithm they become the mean."""
    model, optimizer = make_model(ALL)
    for step in range(5):
        train_step(model, optimizer, step)
    mean = of_all_ranks(flat_of(model)).mean(0)
    loaded = model if by == "itself" else torch.nn.ModuleList([model])
    loaded.load_state_dict(copy.deepcopy(loaded.state_dict()))
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(5, 12):
        train_step(model, still, step)
        assert is_same_everywhere(flat_of(model)) and (flat_of(model) - mean).abs().max() < 1e-6


@pytest.mark.parametrize(("steps_before", "warmup_steps"), [(2, 1), (4, 6)], ids=["fewer", "more"])
@on_ranks(2, eagerly=True)
def test_resumes_with_another_warm_up(steps_before: int, warmup_steps: int) -> None:
    """The first cycle begins with what warm-up, of three steps before, has reached."""
    config = DiLoCo(sync_every=2, warmup_steps=3, outer_lr=1.0, outer_momentum=0.0)
    model, optimizer = make_model(config)
    for step in range(steps_before):
        train_step(model, optimizer, step)
        assert is_same_everywhere(flat_of(model)) == (step < 3)
    states = copy.deepcopy([model.state_dict(), optimizer.state_dict(), model.comm_algorithm.state_dict()])
    model, optimizer = make_model(dataclasses.replace(config, warmup_steps=warmup_steps))
    for each, state in zip((model, optimizer, model.comm_algorithm), states, strict=True):
        each.load_state_dict(state)
    if steps_before == 4:  # the ranks' states of AdamW differ
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = flat_of(model)
    for step in range(1 if steps_before == 2 else 2):  # up to the end of a cycle
        train_step(model, optimizer, 10 + step)
    assert is_same_everywhere(flat_of(model))
    assert (flat_of(model) - before).abs().max() < 2.5 * optimizer.param_groups[0]["lr"]


@on_ranks(2, eagerly=True)
def test_errors() -> None:
    at = f"rank {dist.get_rank()}: "
    of_eight = error_of(ReplicationError, lambda: make_model(DiLoCo(sync_every=9, fragments=9)))
    assert of_eight.startswith(f"{at}DiLoCo(fragments=9) has more fragments than the model has parameters to reduce, 8")
    model, _ = make_model(DiLoCo(sync_every=2))
    double = nn.Linear(2, 2).double()
    dtype = error_of(ReplicationError, lambda: ddp_compile(double, algorithm=DiLoCo(sync_every=2)))
    assert "takes gradients of float32, bfloat16, float16, and refuses" in dtype
    for other in (ALL, DiLoCo(sync_every=2, fragments=2)):
        state = make_model(other)[0].comm_algorithm.state_dict()
        said = error_of(ValueError, lambda state=state: model.comm_algorithm.load_state_dict(state))
        assert "the state of other parameters or fragments; load it" in said
    dist.barrier()  # a rank that leaves closes connections that the other one may still be making


@on_ranks(2, eagerly=True)
def test_optimizer_of_other_parameters_is_refused() -> None:
    """Over a copy of the model, or without a part of it."""
    at = f"rank {dist.get_rank()}: 2 steps of the DiLoCo"
    for of, names in (
        (copy.deepcopy, "layers.0.weight"),
        (lambda model: model.layers[2:], "layers.0.weight, layers.0"),
    ):
        model, _ = make_model(DiLoCo(sync_every=2))
        optimizer = make_adamw(of(model).parameters())
        with pytest.raises(ReductionError, match=f"^{at}.* stepped these parameters: '?{names}"):
            for step in range(4):
                train_step(model, optimizer, step)
