"""Replaces the algorithm of a module between two steps, and averages the states of optimizers that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile.algorithms import AlgorithmConfig, build_algorithm, check_algorithm, refuse_gradients
from ddp_compile.errors import RanksDifferError, ReplicationError, on_ranks, this_rank, with_article
from ddp_compile.features.compatibility import Feature, in_force, refuse_if_excluded, refuse_pairs
from ddp_compile.runtime.algorithms.comm_hook import CommHook
from ddp_compile.runtime.algorithms.flat_parameters import FlatParameters, average_over
from ddp_compile.runtime.buckets import step_watch
from ddp_compile.runtime.comm import streams
from ddp_compile.runtime.comm.collectives import ranks_unlike_rank_0
from ddp_compile.runtime.comm.exchange import Exchange

if TYPE_CHECKING:
    from ddp_compile.module.replicate_state import ReplicateState


def register_comm_hook(state: ReplicateState, hook: CommHook) -> None:
    present = state.reducer.algorithm
    if not present.gives_way_to_comm_hook:
        refuse_if_excluded(Feature.COMM_HOOK, f"the {hook.name}", in_force(state, present))
    state.reducer.agree_on_algorithm(hook)
    step_watch.detach(present, together=True)
    state.reducer.set_algorithm(hook)


def set_comm_algorithm(
    state: ReplicateState, algorithm_config: AlgorithmConfig, optimizers: Sequence[torch.optim.Optimizer] | None
) -> None:
    check_algorithm(algorithm_config)
    group, reducer = state.process_group, state.reducer
    algorithm = build_algorithm(algorithm_config, group)
    refuse_objection(algorithm.objection(state.reduced))
    refuse_gradients(algorithm, state.builder.gradients)
    refuse_pairs(in_force(state, algorithm))
    before, parameters = reducer.algorithm, reducer.parameters
    differ = group.size() > 1 and not before.sends_gradients
    if differ and algorithm.sends_gradients and optimizers is None:
        raise ReplicationError(
            f"{this_rank()}: under the {before.name} the ranks' optimizers have reached different states, so the ranks"
            f" would drift apart under the {algorithm.name}; pass all optimizers, so that their states are averaged:"
            " set_comm_algorithm(algorithm, optimizers=[optimizer])"
        )
    reducer.agree_on_algorithm(algorithm, always=True)
    if differ and optimizers is not None:
        _compare_optimizers(optimizers, group, parameters[0].device)
    step_watch.detach(before, together=True)
    try:
        if differ and optimizers:
            with streams.current_device(parameters[0].device):
                _average_optimizer_states(optimizers, group)
        step_watch.attach(algorithm, state.reduced)
    except Exception:  # raised on every rank, for example if a rank does not know its node
        step_watch.attach(before, state.reduced)
        raise
    reducer.set_algorithm(algorithm)


def refuse_objection(objection: str) -> None:
    """Raise a ReplicationError if an algorithm objects to the parameters."""
    if objection:
        raise ReplicationError(f"{this_rank()}: {objection}")


def _compare_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], process_group: dist.ProcessGroup, device: torch.device
) -> None:
    """Check that `_average_optimizer_states` would make the optimizers of all ranks alike; change nothing.

    Args:
        optimizers: In the same order on every rank.

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
                " make the optimizers anew, and pass optimizers=[]"
            )
    if different := ranks_unlike_rank_0("\n".join(what).encode(), process_group, device):
        raise RanksDifferError(
            f"{this_rank()}: the optimizers have other states or settings {on_ranks(different)} than on"
            " rank 0: after steps that some ranks have skipped, or learning rates that follow each rank's own steps."
            " Make the optimizers anew, and pass optimizers=[]; or set the same settings first"
        )


def _average_optimizer_states(optimizers: Sequence[torch.optim.Optimizer], process_group: dist.ProcessGroup) -> None:
    """Average moments over the ranks, and take step counts and other numbers from rank 0; raises ReductionError."""
    name = "average of optimizer states"
    states = _states_of(optimizers)
    moments = [each.value for each in states if isinstance(each.value, Tensor) and _is_moment(each.value)]
    numbers = [each for each in states if not (isinstance(each.value, Tensor) and _is_moment(each.value))]
    if moments:
        average_over(process_group, FlatParameters(moments), name)
    if not numbers:
        return
    values = [each.value.tolist() if isinstance(each.value, Tensor) else each.value for each in numbers]
    with Exchange(name):
        dist.broadcast_object_list(values, dist.get_global_rank(process_group, 0), group=process_group)
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
