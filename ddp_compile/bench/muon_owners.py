"""Muon as modded-nanogpt distributes it: each matrix is stepped by one rank, and gathered inside the step.

Source: K. Jordan et al., modded-nanogpt, 2024, class ``Muon`` (matrices go to the ranks in turn; an all-gather for each
turn, started as soon as this rank has stepped its matrix).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.optim import Muon, Optimizer

from ddp_compile import torch_internals


def let_owners_step(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """The same optimizers, with `MuonOwners` in the place of Muon.

    Raises:
        ValueError: None of them is Muon.
    """
    if not any(isinstance(each, Muon) for each in optimizers):
        raise ValueError("muon-owners has nothing to distribute without Muon; pass --optimizer muon")
    return [MuonOwners(each) if isinstance(each, Muon) else each for each in optimizers]


class MuonOwners(Optimizer):
    """Steps matrices whose gradients all ranks have, each matrix on one rank of the default group.

    The matrices, sorted by size, go to the ranks in turn. Those of one turn move into the rows of one buffer, so that
    an all-gather completes them in place. The gathers run while the rank steps its next matrices, and ``step()`` waits
    for all of them. Each rank has the states of its own matrices alone.

    Args:
        muon: With the matrices of all ranks, not stepped yet; one group.
    """

    def __init__(self, muon: Muon) -> None:
        (group,) = muon.param_groups
        super().__init__(group["params"], muon.defaults)
        self._rank, world_size = dist.get_rank(), dist.get_world_size()
        self._turns: list[tuple[Muon | None, torch.Tensor]] = []  # of this rank's matrix, and the buffer
        by_size = sorted(group["params"], key=lambda matrix: -matrix.numel())
        for first in range(0, len(by_size), world_size):
            matrices = by_size[first : first + world_size]
            buffer = matrices[0].new_zeros(world_size, matrices[0].numel())
            for row, matrix in zip(buffer, matrices, strict=False):
                matrix.data = row[: matrix.numel()].view_as(matrix).copy_(matrix.detach())
            own = [Muon([matrix], **muon.defaults) for matrix in matrices[self._rank :][:1]]
            self._turns.append((own[0] if own else None, buffer))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure, which the benchmark never has
        """Step this rank's matrices, and get the other ranks'."""
        gathers = []
        for muon, buffer in self._turns:
            if muon is not None:
                muon.step()
            gathers.append(torch_internals.all_gather_single(buffer.view(-1), buffer[self._rank], dist.group.WORLD))
        for gather in gathers:
            gather.wait()
