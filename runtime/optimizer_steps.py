"""Steps of whatever optimizers have certain parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class OptimizerSteps:
    """Calls back before and after each step of any ``torch.optim.Optimizer`` over some of the parameters.

    Of optimizers inside of others, ``PostLocalSGDOptimizer`` for example, the outermost step counts. The end of a step
    that raises is not heard; see `forget`.

    Args:
        parameters: The parameters.
        before: Called when a step begins.
        after: Called when it has ended.
    """

    def __init__(
        self, parameters: Sequence[Parameter], before: Callable[[], None] | None, after: Callable[[], None] | None
    ) -> None:
        self._numbers = {id(parameter) for parameter in parameters}
        self._callbacks = {"before": before, "after": after}
        self._inside: list[weakref.ref[Optimizer]] = []
        alive = weakref.ref(self)

        def begins(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (steps := alive()) is not None:
                steps._begins(optimizer)

        def ends(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (steps := alive()) is not None:
                steps._ends(optimizer)

        never_traced = torch.compiler.disable(reason="what ddp_compile does around an optimizer's step")
        self._handles = [
            register_optimizer_step_pre_hook(never_traced(begins)),
            register_optimizer_step_post_hook(never_traced(ends)),
        ]
        weakref.finalize(self, _remove, self._handles)

    def forget(self) -> None:
        """No step is under way: one that has begun and not ended has raised."""
        self._inside = []

    def stop(self) -> None:
        """Do not call back any more."""
        _remove(self._handles)

    def _begins(self, optimizer: Optimizer) -> None:
        if not self._has_parameters_of(optimizer):
            return
        self._inside.append(weakref.ref(optimizer))
        if len(self._inside) == 1:
            self._call("before")

    def _ends(self, optimizer: Optimizer) -> None:
        inside = [other() for other in self._inside]
        if optimizer not in inside:
            return
        self._inside = self._inside[: inside.index(optimizer)]
        if not self._inside:
            self._call("after")

    def _has_parameters_of(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._numbers for group in optimizer.param_groups for p in group["params"])

    def _call(self, name: str) -> None:
        callback = self._callbacks[name]
        if callback is not None:
            callback()


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
