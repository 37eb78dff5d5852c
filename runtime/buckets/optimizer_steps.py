"""Notices the steps of every optimizer that has some of the parameters."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError
from ddp_compile.runtime.comm import streams


class OptimizerSteps:
    """Calls `step_begins` and `step_ends` around each step of a ``torch.optim.Optimizer`` that has some parameters.

    If an optimizer wraps another one, as ``PostLocalSGDOptimizer`` does, the outermost step counts. If there are
    several optimizers side by side, both are called for each, and `all_have_stepped` says whether all of them have
    stepped. `step_ends` is not called for a step that raises; the next forward outside a step resets it.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = list(parameters)
        self._numbers = {id(parameter) for parameter in parameters}
        self._inside: list[weakref.ref[Optimizer]] = []
        self._num_iterations_inside = 0
        self._stepped: set[int] = set()
        self._optimizers: list[weakref.ref[Optimizer]] = []  # that have stepped since the last iteration
        self._last: set[int] = set()  # the parameters of the optimizer that began to step last
        self._version_before = 0  # of these, when it began
        never_traced = torch.compiler.disable(reason="what ddp_compile does around an optimizer's step")
        self._handles = [
            register_optimizer_step_pre_hook(never_traced(torch_internals.while_alive(self._begins))),
            register_optimizer_step_post_hook(never_traced(torch_internals.while_alive(self._ends))),
        ]
        weakref.finalize(self, _remove, self._handles)

    def step_begins(self) -> None:
        """An optimizer of some of the parameters is about to step."""

    def step_ends(self) -> None:
        """It has stepped."""

    @property
    def stepped(self) -> list[Optimizer]:
        """The optimizers that have stepped since the last iteration, in this order."""
        return [optimizer for each in self._optimizers if (optimizer := each()) is not None]

    @property
    def is_stepping(self) -> bool:
        """Whether a step is under way, unless it has raised."""
        return bool(self._inside)

    @property
    def all_have_stepped(self) -> bool:
        """Whether each parameter with a gradient has been stepped since the last iteration."""
        return all(id(p) in self._stepped for p in self._parameters if p.grad is not None)

    @property
    def has_gradients(self) -> bool:
        """Whether the optimizer that stepped last has a gradient; without one, a step changes nothing."""
        return any(p.grad is not None and id(p) in self._last for p in self._parameters)

    @property
    def has_gradients_left(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(p.grad is not None for p in self._parameters)

    @property
    def _version_of_last(self) -> int:
        return sum(p._version for p in self._parameters if id(p) in self._last)

    def is_inside_step(self, algorithm: str) -> bool:
        """Whether a forward that begins is in the closure of a step.

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
        self._stepped, self._optimizers = set(), []

    def stop(self) -> None:
        _remove(self._handles)

    def _begins(self, optimizer: Optimizer, *_: Any) -> None:
        ids = self._ids_of(optimizer)
        if not ids.isdisjoint(self._numbers):
            what = f"a step of {type(optimizer).__name__}, around which ranks communicate,"
            streams.refuse_capture(self._parameters[0].device, what)
            self._inside.append(weakref.ref(optimizer))
            if len(self._inside) == 1:
                self._num_iterations_inside = 0
                self._last = ids
                self._version_before = self._version_of_last
                self.step_begins()

    def _ends(self, optimizer: Optimizer, *_: Any) -> None:
        inside = [other() for other in self._inside]
        if optimizer not in inside:
            return
        self._inside = self._inside[: inside.index(optimizer)]
        self._stepped |= self._ids_of(optimizer)
        if not self._inside:
            if self._version_of_last == self._version_before:  # a fused optimizer's step leaves it (torch 2.13)
                increment_version([p for p in self._parameters if id(p) in self._last])
            self._optimizers.append(weakref.ref(optimizer))
            self.step_ends()

    def _ids_of(self, optimizer: Optimizer) -> set[int]:
        return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
