"""Callbacks around the steps of every optimizer that has some of the parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError
from ddp_compile.runtime.comm import streams


class OptimizerSteps:
    """Calls back before and after each step of a ``torch.optim.Optimizer`` that has some of the parameters.

    If an optimizer wraps another one, as ``PostLocalSGDOptimizer`` does, the outermost step counts. If there are
    several optimizers side by side, each calls back, and `all_have_stepped` says whether all of them have stepped. A
    step that raises does not call back at its end; the next forward outside a step resets it.
    """

    def __init__(self, parameters: Sequence[Parameter], before: Callable[[], None], after: Callable[[], None]) -> None:
        self._parameters = list(parameters)
        self._numbers = {id(parameter) for parameter in parameters}
        self._before, self._after = before, after
        self._inside: list[weakref.ref[Optimizer]] = []
        self._num_iterations_inside = 0
        self._stepped: set[int] = set()
        self._last: set[int] = set()  # the parameters of the optimizer that began to step last
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

    @property
    def all_have_stepped(self) -> bool:
        """Whether each parameter with a gradient has been stepped since the last iteration."""
        return all(id(p) in self._stepped for p in self._parameters if p.grad is not None)

    @property
    def has_gradients(self) -> bool:
        """Whether the optimizer that stepped last has a gradient; without one, a step changes nothing."""
        return any(p.grad is not None and id(p) in self._last for p in self._parameters)

    def forward_begins(self, algorithm: str) -> bool:
        """A forward with gradients begins; returns whether that is in the closure of a step.

        Raises:
            ReplicationError: It is the second iteration inside one step.
        """
        if self._inside and not torch_internals.inside_optimizer_step():
            self._inside = []  # the step raised
        if not self._inside:
            self._num_iterations_inside = 0
            return False
        if self._num_iterations_inside:
            optimizer = type(self._inside[0]()).__name__
            raise ReplicationError(
                f"a step of {optimizer} calls its closure again. With the {algorithm}, each call is an exchange between"
                " the ranks, but each rank's own loss decides how many there are. Use an optimizer that computes"
                " gradients once in a step, or GradientAllReduce()"
            )
        return True

    def iteration_ends(self) -> None:
        self._num_iterations_inside += bool(self._inside)
        self._stepped = set()

    def stop(self) -> None:
        _remove(self._handles)

    def _begins(self, optimizer: Optimizer) -> None:
        ids = self._ids_of(optimizer)
        if not ids.isdisjoint(self._numbers):
            what = f"a step of {type(optimizer).__name__}, around which ranks communicate,"
            streams.refuse_capture(self._parameters[0].device, what)
            self._inside.append(weakref.ref(optimizer))
            if len(self._inside) == 1:
                self._num_iterations_inside = 0
                self._last = ids
                self._before()

    def _ends(self, optimizer: Optimizer) -> None:
        inside = [other() for other in self._inside]
        if optimizer not in inside:
            return
        self._inside = self._inside[: inside.index(optimizer)]
        self._stepped |= self._ids_of(optimizer)
        if not self._inside:
            self._after()

    def _ids_of(self, optimizer: Optimizer) -> set[int]:
        return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
