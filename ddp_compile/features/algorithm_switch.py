"""Another way to communicate in the place of the one that a module was replicated with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ddp_compile.algorithms import AlgorithmConfig, build_algorithm, check_algorithm, refuse_gradients
from ddp_compile.config import ReplicateConfig
from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.features.optimizer_states import average_optimizer_states, compare_optimizers
from ddp_compile.features.replicated_buffers import ReplicatedBuffers
from ddp_compile.plan.spec import GradientSpec
from ddp_compile.runtime.algorithms.comm_hook import CommHook
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.reducer import Reducer


class AlgorithmSwitch:
    """Changes the algorithm of one module between two steps, on all ranks together.

    Args:
        reducer: Has the algorithm.
        gradients: What is reduced.
        reduced: The parameters whose gradients these are, by name.
        config: Of the module.
        buffers: Of the module.
        has_sharded: Whether the module has submodules of ``fully_shard``.
        process_group: The ranks.
    """

    def __init__(
        self,
        reducer: Reducer,
        gradients: Sequence[GradientSpec],
        reduced: Mapping[str, Parameter],
        config: ReplicateConfig,
        buffers: ReplicatedBuffers,
        has_sharded: bool,
        process_group: dist.ProcessGroup,
    ) -> None:
        self._reducer = reducer
        self._gradients = gradients
        self._reduced = reduced
        self._config = config
        self._buffers = buffers
        self._has_sharded = has_sharded
        self._process_group = process_group
        self._rank = process_group.rank()

    def register_comm_hook(self, hook: CommHook) -> None:
        """See ``ReplicatedModule.register_comm_hook``."""
        present = self._reducer.algorithm
        if not present.gives_way_to_comm_hook:
            raise error_messages.second_algorithm(hook.name, present.name)
        self._reducer.agree_on_algorithm(hook)
        present.detach(together=True)
        self._reducer.set_algorithm(hook)

    def set_algorithm(
        self, algorithm_config: AlgorithmConfig, optimizers: Sequence[torch.optim.Optimizer] | None
    ) -> None:
        """See ``ReplicatedModule.set_comm_algorithm``."""
        check_algorithm(algorithm_config)
        algorithm = build_algorithm(algorithm_config, self._process_group)
        refuse_objection(algorithm.objection(self._reduced), self._rank)
        refuse_gradients(algorithm, self._gradients, self._rank)
        refuse_settings(algorithm, self._config, self._buffers, self._has_sharded, self._process_group)
        before = self._reducer.algorithm
        differ = self._process_group.size() > 1 and not before.sends_gradients
        if differ and algorithm.sends_gradients and optimizers is None:
            raise ReplicationError(
                f"{this_rank()}: by the {before.name} the ranks' optimizers have come to different states, with"
                f" which the {algorithm.name} would not keep the ranks alike; pass all of them, whose states are"
                " averaged: set_comm_algorithm(algorithm, optimizers=[optimizer])"
            )
        self._reducer.agree_on_algorithm(algorithm, always=True)
        parameters = self._reducer.parameters
        if differ and optimizers is not None:
            compare_optimizers(optimizers, self._process_group, parameters[0].device)
        before.detach(together=True)
        try:
            if differ and optimizers:
                average_optimizer_states(optimizers, self._process_group)
            algorithm.attach(parameters)
        except Exception:  # on every rank: the nodes are not known, for example
            before.attach(parameters)
            raise
        self._reducer.set_algorithm(algorithm)


def refuse_objection(objection: str, rank: int) -> None:
    """Raise a ReplicationError if an algorithm has something against the parameters."""
    if objection:
        raise ReplicationError(f"{this_rank()}: {objection}")


def refuse_settings(
    algorithm: CommAlgorithm,
    config: ReplicateConfig,
    buffers: ReplicatedBuffers,
    has_sharded: bool,
    process_group: dist.ProcessGroup,
) -> None:
    """Refuse settings that the algorithm, or another feature of the module, excludes.

    Raises:
        ReplicationError: Names the settings.
    """
    is_free = not algorithm.traits.in_step and process_group.size() > 1
    if is_free and (waits := _settings_that_wait(config, buffers, has_sharded)):
        raise ReplicationError(
            f"{this_rank()}: with the {algorithm.name} no rank waits for another in a step, and with {', '.join(waits)}"
            " they would; leave that out, or pass another algorithm"
        )
    if config.check_finite_gradients and (others := _outside_of_buckets(algorithm, config, has_sharded)):
        raise ReplicationError(
            f"{this_rank()}: check_finite_gradients=True checks the gradients in buckets only, and cannot be used with"
            f" {' and '.join(others)}. Leave it out, and pass error_if_nonfinite=True to clip_grad_norm_ instead"
        )


def _settings_that_wait(config: ReplicateConfig, buffers: ReplicatedBuffers, has_sharded: bool) -> list[str]:
    """Settings with which ranks wait for each other in a step."""
    names = ("find_unused_parameters", "static_graph", "skip_all_reduce_unused_params")
    waits = [f"{name}=True" for name in names if getattr(config, name)]
    if has_sharded:
        waits.append("submodules of fully_shard")
    if config.delayed.named:
        waits.append("delay_all_reduce_named_params")
    if buffers.synchronised():
        waits.append("broadcast_buffers=True")
    return waits


def _outside_of_buckets(algorithm: CommAlgorithm, config: ReplicateConfig, has_sharded: bool) -> list[str]:
    """What reduces gradients that do not pass through the buckets, where they are checked."""
    others = []
    if algorithm.traits.payload != "gradients":
        others.append(f"the {algorithm.name}, which communicates parameters")
    if has_sharded:
        others.append("submodules of fully_shard, which reduces their gradients")
    if config.delayed.named:
        others.append("delay_all_reduce_named_params, whose gradients are averaged by themselves")
    return others
