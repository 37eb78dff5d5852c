"""Counts optimizer steps with gradients that no other rank has."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_compile import torch_internals


class LocalSteps:
    """Counts steps between a backward inside ``no_sync`` and the next forward, or the next backward that is reduced.

    A step changes a parameter, and its gradient is then dropped or set to zero. Either of them alone is no step:
    weights may be swapped for an evaluation in the middle of an accumulation, and a bad micro-batch may be dropped. One
    of the reduced parameters is watched. Its version tells who has written it, except for fused optimizers (torch
    2.13), whose steps call a hook.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.num_found = 0
        self._parameters = parameters
        self._watched: int | None = None
        self._value_before = 0
        self._gradient_before: tuple[int, int] | None = None
        self._is_stepped = False  # by an optimizer
        self._listens = False  # to all optimizers, from the first backward inside ``no_sync`` on

    def gradient_arrives(self, index: int) -> bool:
        """A parameter's gradient has been accumulated inside ``no_sync``: whether it is the first since a forward."""
        is_first = self._watched is None
        if not self._listens:
            self._listens = True
            never_traced = torch.compiler.disable(reason="ddp_compile counts optimizer steps")
            note_step = never_traced(torch_internals.while_alive(self.note_step))
            weakref.finalize(self, register_optimizer_step_post_hook(note_step).remove)
        if self._watched is None or self._watched == index:
            self._watched, self._is_stepped = index, False
            self._value_before = self._parameters[index]._version
            self._gradient_before = self._gradient_of(index)
        return is_first

    def end_watch(self) -> None:
        """A forward with gradients begins, inside ``no_sync`` or not, or a backward that is reduced."""
        if self._watched is None:
            return
        has_changed = self._is_stepped or self._parameters[self._watched]._version != self._value_before
        self.num_found += has_changed and self._gradient_of(self._watched) != self._gradient_before
        self._watched, self._is_stepped = None, False

    def note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer has stepped."""
        if self._watched is not None:
            parameter = self._parameters[self._watched]
            self._is_stepped |= any(parameter is p for group in optimizer.param_groups for p in group["params"])

    def _gradient_of(self, index: int) -> tuple[int, int] | None:
        """Which tensor it is, and how often it was written."""
        gradient = self._parameters[index].grad
        return None if gradient is None else (id(gradient), gradient._version)
