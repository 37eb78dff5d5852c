"""Replaces the algorithm of a module between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_compile.algorithms import AlgorithmConfig, build_algorithm, check_algorithm, refuse_gradients
from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.features.compatibility import Feature, in_force, refuse_if_excluded, refuse_pairs
from ddp_compile.runtime.algorithms.comm_hook import CommHook
from ddp_compile.runtime.buckets import step_watch

if TYPE_CHECKING:
    from ddp_compile.module.replicate_state import ReplicateState

#: The way from an algorithm that averages parameters to one that sends gradients.
REPLICATE_ANEW = (
    "replicate the model again, model = ddp_compile(model.unwrap(), algorithm=...), and make its optimizers anew"
)


def register_comm_hook(state: ReplicateState, hook: CommHook) -> None:
    present = state.reducer.algorithm
    if not present.gives_way_to_comm_hook:
        refuse_if_excluded(Feature.COMM_HOOK, f"the {hook.name}", in_force(state, present))
    state.reducer.agree_on_algorithm(hook)
    step_watch.detach(present, together=True)
    state.reducer.set_algorithm(hook)


def set_comm_algorithm(state: ReplicateState, algorithm_config: AlgorithmConfig) -> None:
    check_algorithm(algorithm_config)
    before, reducer = state.reducer.algorithm, state.reducer
    algorithm = build_algorithm(algorithm_config, state.process_group)
    refuse_objection(algorithm.objection(state.reduced))
    refuse_gradients(algorithm, state.builder.gradients)
    refuse_pairs(in_force(state, algorithm))
    if algorithm.sends_gradients and not before.sends_gradients and state.process_group.size() > 1:
        raise ReplicationError(
            f"{this_rank()}: under the {before.name} the ranks' optimizers have reached different states, so the ranks"
            f" would drift apart under the {algorithm.name}; {REPLICATE_ANEW}"
        )
    reducer.agree_on_algorithm(algorithm, always=True)
    step_watch.detach(before, together=True)
    try:
        step_watch.attach(algorithm, state.reduced)
    except Exception:  # raised on every rank, for example if a rank does not know its node
        step_watch.attach(before, state.reduced)
        raise
    reducer.set_algorithm(algorithm)


def refuse_objection(objection: str) -> None:
    """Raise a ReplicationError if an algorithm objects to the parameters."""
    if objection:
        raise ReplicationError(f"{this_rank()}: {objection}")
