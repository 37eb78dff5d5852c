"""Which rank owns which parameter."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from ddp_compile.runtime.sharded.owners import Owners, choose_owners, cost_of


def owners_of(optimizers: list[torch.optim.Optimizer], world_size: int) -> Owners:
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return choose_owners(optimizers, {id(p): index for index, p in enumerate(parameters)}, world_size)


@pytest.mark.parametrize("seed", range(5))
def test_load_is_within_four_thirds_of_best(seed: int) -> None:
    rng = random.Random(seed)
    costs = [float(rng.randint(1, 30)) for _ in range(7)]
    owners = owners_of([torch.optim.Adafactor([nn.Parameter(torch.zeros(int(cost))) for cost in costs])], 3)
    rank_of, loads = owners.rank_of, owners.loads
    assert sorted(rank_of) == list(range(7))
    assert [sum(costs[i] for i in rank_of if rank_of[i] == rank) for rank in range(3)] == list(loads)
    choices = itertools.product(range(3), repeat=7)
    best = min(
        max(sum(c for c, r in zip(costs, choice, strict=True) if r == rank) for rank in range(3)) for choice in choices
    )
    assert max(loads) <= 4 / 3 * best


def test_the_layers_of_a_transformer_are_even() -> None:
    """Twelve layers of GPT's four matrices: the loads of 2 to 8 ranks are within 10 % of the mean."""
    width = 64
    shapes = 12 * [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for world_size in range(2, 9):
        owners = owners_of([torch.optim.Muon(parameters)], world_size)
        assert owners.worst_of_mean <= 1.1, (world_size, owners.worst_of_mean)


def test_two_optimizers_share_the_load() -> None:
    parameters = [nn.Parameter(torch.zeros(8, 8)) for _ in range(2)]
    owners = owners_of([torch.optim.Muon([parameter]) for parameter in parameters], 2)
    assert dict(owners.rank_of) == {0: 0, 1: 1} and owners.name == "Muon" and owners.worst_of_mean == 1.0


def test_muon_costs_its_matrix_products() -> None:
    parameter = nn.Parameter(torch.zeros(5, 3))
    muon = torch.optim.Muon([parameter], ns_steps=2)
    assert cost_of(muon, muon.param_groups[0], parameter) == 15 + 2 * (2 * 3 * 5 * 3 + 2 * 3 * 3 * 3 + 2 * 3 * 3 * 5)
    assert cost_of(torch.optim.Adafactor([parameter]), {}, parameter) == 15
