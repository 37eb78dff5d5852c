"""Which rank steps which whole parameter."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import Muon, Optimizer

from ddp_compile.errors import this_rank, warning_level

log = logging.getLogger(__name__)

#: A rank with more than this many times the mean work causes a warning.
_UNEVEN = 1.5


@dataclass(frozen=True, slots=True)
class Owners:
    """The owners of the parameters of some optimizers."""

    name: str  #: the optimizers'
    rank_of: Mapping[int, int]  #: the rank that steps all of a parameter, by the parameter's number
    loads: tuple[float, ...]  #: for each rank, the cost of its parameters

    @property
    def worst_of_mean(self) -> float:
        """The work of the most loaded rank, in units of the mean over the ranks."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean if mean else 1.0

    def describe(self) -> str:
        """A line for ``model.explain()``."""
        numbers = [sum(rank == owner for owner in self.rank_of.values()) for rank in range(len(self.loads))]
        return (
            f"{self.name} steps whole parameters: {', '.join(map(str, numbers))} on ranks 0 to {len(numbers) - 1}; the"
            f" rank with most to do has {self.worst_of_mean:.2f} times the mean"
        )

    def warn_if_uneven(self, process_group: dist.ProcessGroup) -> None:
        """Log that the ranks wait for one of them, if it has much more to do than the mean."""
        if self.worst_of_mean > _UNEVEN:
            log.log(
                warning_level(process_group),
                f"{this_rank()}: {self.describe()}, so a step takes that much longer than an even one. Give the largest"
                " parameters to an optimizer that works element by element, such as AdamW, or train on fewer ranks",
            )


def choose_owners(optimizers: Sequence[Optimizer], reduced: Mapping[int, int], world_size: int) -> Owners:
    """The owner of each parameter of some optimizers, the same on every rank.

    The largest first, each goes to the rank that has least to do so far (longest processing time first: Graham 1969).
    Then no rank has more than 4/3 of what the best choice gives. ``reduced`` has the numbers of the parameters that are
    reduced, by ``id``; the others get no owner.
    """
    costs = {
        reduced[id(parameter)]: cost_of(optimizer, group, parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in reduced
    }
    loads = [0.0] * world_size
    rank_of = {}
    for index in sorted(costs, key=lambda index: (-costs[index], index)):
        owner = loads.index(min(loads))
        rank_of[index] = owner
        loads[owner] += costs[index]
    names = dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)
    return Owners(", ".join(names), rank_of, tuple(loads))


def cost_of(optimizer: Optimizer, group: Mapping[str, Any], parameter: Parameter) -> float:
    """What a step of a parameter costs: floating-point operations for Muon, otherwise elements.

    Each of Muon's Newton-Schulz iterations computes, for an m x n matrix X with m <= n, X X' (2 m m n operations), its
    square (2 m m m), and the product with X (2 m m n): ``_zeropower_via_newtonschulz`` of torch 2.13, optim/_muon.py.
    """
    if not isinstance(optimizer, Muon):
        return parameter.numel()
    rows, columns = sorted(parameter.shape)
    return parameter.numel() + group["ns_steps"] * (4 * rows**2 * columns + 2 * rows**3)
