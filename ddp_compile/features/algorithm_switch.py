"""Replaces the algorithm of a module between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_compile.algorithms import AlgorithmConfig, build_algorithm, check_algorithm, refuse_gradients
from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.features.compatibility import Feature, in_force, refuse_if_excluded, refuse_pairs
from ddp_compile.features.optimizer_states import average_optimizer_states, compare_optimizers
from ddp_compile.features.replica import Replica
from ddp_compile.runtime.algorithms.comm_hook import CommHook


def register_comm_hook(state: Replica, hook: CommHook) -> None:
    """See ``ReplicatedModule.register_comm_hook``."""
    present = state.reducer.algorithm
    if not present.gives_way_to_comm_hook:
        refuse_if_excluded(Feature.COMM_HOOK, f"the {hook.name}", in_force(state, present))
    state.reducer.agree_on_algorithm(hook)
    present.detach(together=True)
    state.reducer.set_algorithm(hook)


def set_comm_algorithm(
    state: Replica, algorithm_config: AlgorithmConfig, optimizers: Sequence[torch.optim.Optimizer] | None
) -> None:
    """See ``ReplicatedModule.set_comm_algorithm``."""
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
        compare_optimizers(optimizers, group, parameters[0].device)
    before.detach(together=True)
    try:
        if differ and optimizers:
            average_optimizer_states(optimizers, group)
        algorithm.attach(parameters)
    except Exception:  # raised on every rank, for example if a rank does not know its node
        before.attach(parameters)
        raise
    reducer.set_algorithm(algorithm)


def refuse_objection(objection: str) -> None:
    """Raise a ReplicationError if an algorithm objects to the parameters."""
    if objection:
        raise ReplicationError(f"{this_rank()}: {objection}")
