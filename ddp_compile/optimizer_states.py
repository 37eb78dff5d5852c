"""States of optimizers that have become different on the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile.errors import RanksDifferError, ReductionError
from ddp_compile.runtime import error_messages
from ddp_compile.runtime.algorithms.flat_parameters import FlatParameters, average_over
from ddp_compile.runtime.collectives import ranks_unlike_rank_0
from ddp_compile.runtime.rank_names import format_ranks


def average_optimizer_states(
    optimizers: Sequence[torch.optim.Optimizer], process_group: dist.ProcessGroup, device: torch.device
) -> None:
    """Let moments and the like be their means over the ranks; counts of steps, of shape (), stay.

    Args:
        optimizers: In the same order on every rank.
        process_group: The ranks.
        device: Where messages between them may lie.

    Raises:
        RanksDifferError: On every rank, if one has a state for a parameter that another one has not.
        ReductionError: A rank has not come.
    """
    averaged = _floating_states(optimizers)
    what = "\n".join(f"{name}: {tensor.dtype}{list(tensor.shape)}" for name, tensor in averaged)
    if different := ranks_unlike_rank_0(what.encode(), process_group, device):
        raise RanksDifferError(
            f"rank {process_group.rank()}: the optimizers' states have other parts on ranks {format_ranks(different)}"
            " than on rank 0, after steps that some ranks have skipped for example; make the optimizers anew, and pass"
            " optimizers=[]"
        )

    def fail(error: RuntimeError) -> ReductionError:
        return error_messages.exchange_failed(process_group.rank(), "average of optimizer states", error)

    average_over(process_group, FlatParameters([tensor for _, tensor in averaged]), fail)


def _floating_states(optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[str, Tensor]]:
    """Each with a name, the same on every rank."""
    return [
        (f"optimizer {number}, parameter {place}, {key}", value)
        for number, optimizer in enumerate(optimizers)
        for place, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
    ]
