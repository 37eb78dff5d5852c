"""The reducer's hook on each parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals


class ArrivalListener(Protocol):
    """Who is told that a gradient has been accumulated into ``.grad``."""

    def mark_parameter_ready(self, index: int) -> None: ...


class ParameterHooks:
    """Tells a listener of the gradients that matter to it, and strikes the others off a list.

    Args:
        parameters: The parameters, spoken of by their number.
        listener: Not kept alive.

    Note [One of many]
    With thousands of small parameters, hooks are what a reducer costs. Of a bucket's gradients only two need thought:
    the one that begins a backward and the one that completes the bucket. After the first one of a backward the reducer
    calls `count` with the sets of gradients each bucket misses, and from then on a hook that does not hold the last of
    such a set removes its number from it and is done. `call_for_each` ends that.
    """

    def __init__(self, parameters: Sequence[Parameter], listener: ArrivalListener) -> None:
        # By parameter number: the set of numbers that its bucket misses while gradients are counted. The hooks hold the
        # list itself.
        self._missing: list[set[int]] = [set()] * len(parameters)
        self._nothing_missing = list(self._missing)
        # A strong reference would make a cycle through C++ (parameter, hook, reducer, parameter) that gc cannot see.
        weak = weakref.ref(listener)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_hook_for(weak, index, self._missing))
            for index, parameter in enumerate(parameters)
        ]
        self._all_hooks = [torch_internals.post_accumulate_grad_hooks(parameter) for parameter in parameters]

    def count(self, missing: Sequence[set[int]]) -> None:
        """From now on, count gradients.

        Args:
            missing: For each parameter the set of its bucket's parameters whose gradients are still missing, one
                object for all parameters of a bucket.
        """
        self._missing[:] = missing

    def count_apart(self, indices: Sequence[int], missing: set[int]) -> None:
        """As `count`, for the parameters of one bucket."""
        for index in indices:
            self._missing[index] = missing

    def call_for_each(self) -> None:
        """From now on, tell the listener of every gradient, as at the beginning."""
        self._missing[:] = self._nothing_missing

    def run_last(self) -> None:
        """Let hooks that were registered since then run before the reducer's."""
        torch_internals.run_last(self._all_hooks, self._handles)

    def remove(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()


def _hook_for(
    listener: weakref.ref[ArrivalListener], index: int, missing_of: list[set[int]]
) -> Callable[[Tensor], None]:
    def hook(_parameter: Tensor) -> None:
        missing = missing_of[index]
        if index in missing and len(missing) > 1:
            missing.remove(index)
            return
        alive = listener()
        if alive is not None:
            alive.mark_parameter_ready(index)

    return hook
