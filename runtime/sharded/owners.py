"""Which rank steps which whole parameter."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Parameter
from torch.optim import Muon, Optimizer

from ddp_compile.errors import ReplicationError, number_of, this_rank

log = logging.getLogger(__name__)

#: A rank with more than this many times the mean work causes a warning or an error.
_UNEVEN = 1.5


@dataclass(frozen=True, slots=True)
class Owners:
    """The owners of the parameters of some optimizers.

    Args:
        name: The optimizers'.
        rank_of: The rank that steps all of a parameter, by the parameter's number.
        costs: Of a step of each of them.
        loads: For each rank, the cost of its parameters.
    """

    name: str
    rank_of: Mapping[int, int]
    costs: Mapping[int, float]
    loads: tuple[float, ...]

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

    def refuse_if_uneven(self, names: Sequence[str]) -> None:
        """Raise a ReplicationError if a rank owns nothing, or if one parameter sets the time of a step.

        Args:
            names: Of the parameters, by their numbers.
        """
        ranks, total = len(self.loads), sum(self.costs.values())
        idle = ranks - len(set(self.rank_of.values()))
        largest = max(self.costs, key=lambda index: self.costs[index])
        if idle:
            what = f"leaves {number_of(idle, 'rank')} without any"
        elif self.worst_of_mean > _UNEVEN and self.costs[largest] > total / 2:
            what = (
                f"costs more for {names[largest]} than for all others together, so a step takes"
                f" {self.worst_of_mean:.2f} times as long as an even one"
            )
        else:
            return
        raise ReplicationError(
            f"{this_rank()}: {self.name} with {number_of(len(self.costs), 'whole parameter')} on"
            f" {number_of(ranks, 'rank')} {what}. Give such parameters to an optimizer that works element by element,"
            " such as AdamW; pass cost= to shard_optimizer if its estimate of their cost is wrong; or accept this with"
            " allow_uneven=True"
        )

    def warn_if_uneven(self) -> None:
        """Log which rank the others wait for, if it has much more to do than the mean."""
        if self.worst_of_mean > _UNEVEN:
            idle = sum(not load for load in self.loads)
            log.warning(
                "%s: %s steps %s on %s. Rank %d has %.2f times the mean to do%s, so a step takes that much longer than"
                " an even one. More or smaller parameters would help, or cost= of shard_optimizer if its estimate of"
                " their cost is wrong",
                this_rank(),
                self.name,
                number_of(len(self.rank_of), "whole parameter"),
                number_of(len(self.loads), "rank"),
                self.loads.index(max(self.loads)),
                self.worst_of_mean,
                f", and {number_of(idle, 'rank')} nothing" if idle else "",
            )


def choose_owners(
    optimizers: Sequence[Optimizer],
    reduced: Mapping[int, int],
    world_size: int,
    cost: Callable[[Parameter], float] | None,
) -> Owners:
    """The owner of each parameter of some optimizers, the same on every rank.

    The largest first, each goes to the rank that has least to do so far (longest processing time first: Graham 1969).
    Then no rank has more than 4/3 of what the best choice gives.

    Args:
        reduced: Numbers of the parameters that are reduced, by ``id``; the others get no owner.
        cost: Of a step of a parameter; None for `cost_of`.

    Raises:
        ReplicationError: ``cost`` has raised, or returned no cost.
    """

    def of(optimizer: Optimizer, group: Mapping[str, Any], parameter: Parameter) -> float:
        if cost is None:
            return cost_of(optimizer, group, parameter)
        try:
            return float(cost(parameter))
        except Exception as error:
            raise ReplicationError(f"{this_rank()}: cost= of shard_optimizer has raised {error!r}") from error

    costs = {
        reduced[id(parameter)]: of(optimizer, group, parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in reduced
    }
    if wrong := [each for each in costs.values() if not 0 <= each < math.inf]:
        raise ReplicationError(
            f"{this_rank()}: cost= of shard_optimizer has returned {wrong[0]} for a parameter; return a finite number"
            " of at least 0, the same on every rank"
        )
    loads = [0.0] * world_size
    rank_of = {}
    for index in sorted(costs, key=lambda index: (-costs[index], index)):
        owner = loads.index(min(loads))
        rank_of[index] = owner
        loads[owner] += costs[index]
    names = dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)
    return Owners(", ".join(names), rank_of, costs, tuple(loads))


def cost_of(optimizer: Optimizer, group: Mapping[str, Any], parameter: Parameter) -> float:
    """What a step of a parameter costs: floating-point operations for Muon, otherwise elements.

    Each of Muon's Newton-Schulz iterations computes, for an m x n matrix X with m <= n, X X' (2 m m n operations), its
    square (2 m m m), and the product with X (2 m m n): ``_zeropower_via_newtonschulz`` of torch 2.13, optim/_muon.py.
    """
    if not isinstance(optimizer, Muon):
        return parameter.numel()
    rows, columns = sorted(parameter.shape)
    return parameter.numel() + group["ns_steps"] * (4 * rows**2 * columns + 2 * rows**3)
