"""Which rank steps which parameter, if parameters are not cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import Parameter
from torch.optim import Muon, Optimizer


def choose_owners(
    optimizer: Optimizer, reduced: Mapping[int, int], world_size: int, cost: Callable[[Parameter], float] | None
) -> dict[int, int]:
    """The owner of each parameter of an optimizer, the same on every rank.

    The largest first, each goes to the rank that has least to do so far (longest processing time first: Graham 1969).
    Then no rank has more than 4/3 of what the best choice gives.

    Args:
        reduced: Numbers of the parameters that are reduced, by ``id``; the others get no owner.
        cost: Of a step of a parameter; None for `cost_of`.
    """
    costs = {
        reduced[id(parameter)]: float(cost(parameter) if cost else cost_of(optimizer, group, parameter))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in reduced
    }
    loads = [0.0] * world_size
    owners = {}
    for index in sorted(costs, key=lambda index: (-costs[index], index)):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += costs[index]
    return owners


def cost_of(optimizer: Optimizer, group: Mapping[str, Any], parameter: Parameter) -> float:
    """What a step of a parameter costs: floating-point operations for Muon, otherwise elements.

    Each of Muon's Newton-Schulz iterations computes, for an m x n matrix X with m <= n, X X' (2 m m n operations), its
    square (2 m m m), and the product with X (2 m m n): ``_zeropower_via_newtonschulz`` of torch 2.13, optim/_muon.py.
    """
    if not isinstance(optimizer, Muon):
        return parameter.numel()
    rows, columns = sorted(parameter.shape)
    return parameter.numel() + group["ns_steps"] * (4 * rows**2 * columns + 2 * rows**3)
