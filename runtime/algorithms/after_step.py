"""Algorithms that communicate what an optimizer's step has made of the parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch.distributed as dist
from torch.nn import Parameter

from ddp_compile.errors import ReductionError
from ddp_compile.runtime.algorithms.optimizer_steps import OptimizerSteps
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm
from ddp_compile.runtime.comm import error_messages


class AfterStep(CommAlgorithm):
    """Communicates once for each iteration that `meets_others`, after all parameters with a gradient were stepped.

    If no optimizer steps, as when a GradScaler skips a step, it communicates when the next forward begins or a
    checkpoint is taken. Ranks need not agree on whether a step follows: each of them communicates once. So if a rank
    may skip a step by itself, nothing else may be sent between the ranks until then. A step that follows after all is
    an error, since the parameters were sent without it.

    Args:
        process_group: All ranks.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group
        self._owes = False  # whether the last iteration has yet to be communicated
        self._paid_without_step = False  # whether it was communicated before any step
        self._steps: OptimizerSteps | None = None

    @abstractmethod
    def communicate(self) -> None:
        """Exchange with the other ranks: an iteration has ended, and its step is done or was skipped."""

    def attach(self, parameters: Sequence[Parameter]) -> None:
        """Hear of optimizers from now on."""
        self._steps = OptimizerSteps(parameters, self._step_begins, self._step_ends)

    def detach(self, together: bool) -> None:
        """Hear of no optimizer any more; what is owed is communicated if all ranks are there."""
        if self._steps is not None:
            self._steps.stop()
        if together:
            self.pay()

    def before_forward(self) -> None:
        """Communicate what is still owed."""
        if self._steps is not None and not self._steps.forward_begins(self.name):
            self.pay()

    def after_backward(self) -> None:
        """An iteration has ended, and its step follows; communicate for the one before if that is still owed."""
        self.pay()  # a backward without a forward before it, in which nothing has stepped since
        self._owes = self.meets_others
        self._paid_without_step = False
        if self._steps is not None:
            self._steps.iteration_ends()

    def pay(self) -> None:
        """Communicate now if the last iteration has yet to be communicated; on every rank."""
        if self._owes:
            self.owe_nothing()
            self.communicate()
            self._paid_without_step = True

    def owe_nothing(self) -> None:
        """Forget the last iteration."""
        self._owes = self._paid_without_step = False

    def _step_begins(self) -> None:
        if self._paid_without_step and self._steps is not None and self._steps.has_gradients:
            raise error_messages.late_step(self.name)

    def _step_ends(self) -> None:
        if self._steps is not None and self._steps.all_have_stepped:
            self.pay()
            self._paid_without_step = False

    def _failed(self, error: RuntimeError) -> ReductionError:
        return error_messages.exchange_failed(self.name, error)
