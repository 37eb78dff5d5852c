"""The AccumulateGrad node of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.runtime.buckets.local_tensors import redistribution_to


class Accumulators:
    """The AccumulateGrad nodes of all parameters, and our hooks on them.

    It keeps the nodes alive, since a node's hooks, including those of users, would be lost with it.

    Args:
        parameters: The parameters, in the order of their numbers.

    Source: ``grad_accumulators_`` of ``Reducer`` in torch 2.13, csrc/distributed/c10d/reducer.cpp.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._nodes = [torch_internals.accumulator_of(parameter) for parameter in parameters]
        self._prehooks: dict[int, Any] = {}
        self._last_hooks: dict[int, Any] = {}
        self._redistributions = [
            torch_internals.register_own(node.register_prehook, redistribution_to(parameter.placements))
            for node, parameter in zip(self._nodes, parameters, strict=True)
            if torch_internals.is_dtensor(parameter)
        ]

    def are_going_to_run(self, indices: Sequence[int]) -> bool:
        """Whether the backward pass that this thread is in will accumulate into all of these parameters."""
        return torch_internals.are_going_to_run([self._nodes[index] for index in indices])

    def has_prehook(self, index: int) -> bool:
        """Whether `add_prehook` was called for a parameter."""
        return index in self._prehooks

    def add_prehook(self, index: int, prehook: Callable[[tuple[Any, ...]], None]) -> None:
        """Call a function with each gradient that reaches a parameter's node, or with None if it is undefined."""
        self._prehooks[index] = torch_internals.register_own(self._nodes[index].register_prehook, prehook)

    def run_last(self, index: int, hook: Callable[[object, object], None]) -> None:
        """From a parameter's own hook: run this hook after all others on the parameter and its node.

        Hooks that users have registered since the last call also run before it.
        """
        if index not in self._last_hooks:
            self._last_hooks[index] = torch_internals.register_own(self._nodes[index].register_hook, hook)
        torch_internals.run_last(self._last_hooks[index])

    def remove_hooks(self) -> None:
        """Remove our hooks from the nodes."""
        for handle in (*self._prehooks.values(), *self._last_hooks.values(), *self._redistributions):
            handle.remove()
        self._redistributions.clear()
        self._prehooks.clear()
        self._last_hooks.clear()
