"""The AccumulateGrad node of each parameter.

Note [Placements of gradients]
A gradient may have other placements than its parameter: the weight of a norm whose inputs are sharded by rows is the
same on all ranks, and its gradient is a partial sum on each. A rank without a gradient contributes zeros, which only
fit the parameter's placements, so a gradient gets those before it is accumulated. That is a collective over the ranks
of the mesh. They run the same graph, so all of them get its gradients in the same order. Their buckets may be complete
in different orders, since groups that reduce different parts have plans of their own.

Source: ``_get_grad_inner_tensor`` of ``FSDPParam`` in torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn import Parameter

from ddp_compile import torch_internals

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


class Accumulators:
    """The AccumulateGrad nodes of all parameters, by their numbers, and our hooks on them.

    It keeps the nodes alive, since a user's hook on a node would die with it.

    Source: ``grad_accumulators_`` of ``Reducer`` in torch 2.13, csrc/distributed/c10d/reducer.cpp.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._nodes = [torch_internals.accumulator_of(parameter) for parameter in parameters]
        self._prehooks: dict[int, Any] = {}
        self._last_hooks: dict[int, Any] = {}
        self._redistributions = [
            torch_internals.register_own(node.register_prehook, _redistribution_to(parameter.placements))
            for node, parameter in zip(self._nodes, parameters, strict=True)
            if torch_internals.is_dtensor(parameter)
        ]

    def are_going_to_run(self, indices: Sequence[int]) -> bool:
        """Whether the backward pass that this thread is in will accumulate into all of these parameters."""
        return torch_internals.are_going_to_run([self._nodes[index] for index in indices])

    def add_prehook(self, index: int, prehook: Callable[[tuple[Any, ...]], None]) -> None:
        """Unless a parameter has one: call a function with each gradient that reaches its node, None if undefined."""
        if index not in self._prehooks:
            self._prehooks[index] = torch_internals.register_own(self._nodes[index].register_prehook, prehook)

    def run_last(self, index: int, hook: Callable[[object, object], None]) -> None:
        """From a parameter's own hook: run this hook after all others on the parameter and its node.

        Hooks that users have registered since the last call also run before it.
        """
        if index not in self._last_hooks:
            self._last_hooks[index] = torch_internals.register_own(self._nodes[index].register_hook, hook)
        torch_internals.run_last(self._last_hooks[index])

    def remove_hooks(self) -> None:
        for handle in (*self._prehooks.values(), *self._last_hooks.values(), *self._redistributions):
            handle.remove()
        self._redistributions.clear()
        self._prehooks.clear()
        self._last_hooks.clear()


def _redistribution_to(placements: Sequence[Placement]) -> Callable[[tuple[Any, ...]], tuple[Any, ...] | None]:
    """A prehook of AccumulateGrad that gives gradients these placements; see Note [Placements of gradients]."""

    def prehook(gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
        gradient = gradients[0]
        if gradient is None or gradient.placements == placements:
            return None
        return (gradient.redistribute(placements=placements),)

    return prehook
