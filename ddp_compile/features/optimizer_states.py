"""Averages the states of optimizers that differ between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile.errors import RanksDifferError, ReductionError, this_rank, with_article
from ddp_compile.runtime.algorithms.flat_parameters import FlatParameters, average_over
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.collectives import ranks_unlike_rank_0
from ddp_compile.runtime.comm.rank_names import format_ranks


def compare_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], process_group: dist.ProcessGroup, device: torch.device
) -> None:
    """Check that `average_optimizer_states` would make the optimizers of all ranks equal. Changes nothing.

    Args:
        optimizers: In the same order on every rank.
        process_group: The ranks.
        device: A device for messages between them.

    Raises:
        TypeError: Not optimizers, or a state is neither a tensor nor a number.
        RanksDifferError: On every rank, if ranks have states for different parameters, or different settings.
    """
    if not isinstance(optimizers, Sequence) or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        raise TypeError(f"{this_rank()}: optimizers={optimizers!r}: pass a list of torch.optim.Optimizer")
    what = [_settings_of(optimizer) for optimizer in optimizers]
    for state in _states_of(optimizers):
        if isinstance(state.value, Tensor):
            what.append(f"{state.name}: {state.value.dtype}{list(state.value.shape)}")
        elif isinstance(state.value, int | float) or state.value is None:
            what.append(f"{state.name}: {type(state.value).__name__}")
        else:
            raise TypeError(
                f"{this_rank()}: {state.name} is {with_article(type(state.value).__name__)}, which cannot be averaged;"
                " make new optimizers, and pass optimizers=[]"
            )
    if different := ranks_unlike_rank_0("\n".join(what).encode(), process_group, device):
        raise RanksDifferError(
            f"{this_rank()}: the optimizers have other states or settings on ranks {format_ranks(different)} than on"
            " rank 0, because some ranks have skipped steps, or because learning rates follow each rank's own steps."
            " Make new optimizers, and pass optimizers=[]; or set the same settings first"
        )


def average_optimizer_states(optimizers: Sequence[torch.optim.Optimizer], process_group: dist.ProcessGroup) -> None:
    """Average moments and similar states over the ranks. Take step counts and other numbers from rank 0.

    Args:
        optimizers: Checked by `compare_optimizers`.
        process_group: The ranks.

    Raises:
        ReductionError: A rank did not come.
    """

    def fail(error: RuntimeError) -> ReductionError:
        return error_messages.exchange_failed("average of optimizer states", error)

    states = _states_of(optimizers)
    moments = [each.value for each in states if isinstance(each.value, Tensor) and _is_moment(each.value)]
    numbers = [each for each in states if not (isinstance(each.value, Tensor) and _is_moment(each.value))]
    if moments:
        average_over(process_group, FlatParameters(moments), "average of optimizer states")
    if not numbers:
        return
    values = [each.value.tolist() if isinstance(each.value, Tensor) else each.value for each in numbers]
    try:
        dist.broadcast_object_list(values, dist.get_global_rank(process_group, 0), group=process_group)
    except RuntimeError as error:
        raise fail(error) from error
    for each, value in zip(numbers, values, strict=True):
        if isinstance(each.value, Tensor):
            each.value.copy_(torch.tensor(value, dtype=each.value.dtype))
        else:
            each.of_parameter[each.key] = value


class _State(NamedTuple):
    name: str
    of_parameter: dict[str, Any]
    key: str
    value: Any


def _states_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[_State]:
    """All states, in the same order on every rank."""
    return [
        _State(f"state {key} of parameter {place} of optimizer {number}", state, key, value)
        for number, optimizer in enumerate(optimizers)
        for place, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
        if (state := optimizer.state.get(parameter, {})) is not None
        for key, value in sorted(state.items())
    ]


def _is_moment(value: Tensor) -> bool:
    return value.is_floating_point() and value.dim() > 0


def _settings_of(optimizer: torch.optim.Optimizer) -> str:
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} {groups}"
