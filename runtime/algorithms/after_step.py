"""Algorithms that communicate what an optimizer's step has made of the parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch.nn import Parameter

from ddp_compile.runtime.algorithms.base import CommAlgorithm
from ddp_compile.runtime.optimizer_steps import OptimizerSteps


class AfterStep(CommAlgorithm):
    """Communicates once for each iteration: when all parameters that have a gradient have been stepped since.

    Where no optimizer steps, a GradScaler skips a step for example, it does so when the next forward begins, or a
    checkpoint is taken: whether a step follows is no matter of all ranks, and each of them communicates once for each
    iteration. So where a rank may skip a step by itself, nothing else may be sent between the ranks until then.
    """

    def __init__(self) -> None:
        self._owes = False  # for the iteration that has ended
        self._steps: OptimizerSteps | None = None

    @abstractmethod
    def communicate(self) -> None:
        """An iteration is over, and its step done."""

    def attach(self, parameters: Sequence[Parameter]) -> None:
        """Hear of optimizers from now on."""
        self._steps = OptimizerSteps(parameters, after=self._step_ends)

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
        """An iteration has ended, whose step follows; of the one before nothing is owed any more."""
        self.pay()  # a backward without a forward before it, in which nothing has stepped since
        self._owes = True
        if self._steps is not None:
            self._steps.iteration_ends()

    def pay(self) -> None:
        """Communicate now, if there is an iteration for which that has not been done; on every rank."""
        if self._owes:
            self._owes = False
            self.communicate()

    def _step_ends(self) -> None:
        if self._steps is not None and self._steps.all_have_stepped:
            self.pay()
