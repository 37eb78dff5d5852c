"""Algorithms that send parameters after an optimizer's step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

import torch.distributed as dist

from ddp_compile.errors import ReductionError, this_rank
from ddp_compile.runtime.algorithms.parameter_average import ParameterAverage


class Exchange(Enum):
    """The state of the last iteration's exchange."""

    NONE = auto()  #: there is none
    DUE = auto()  #: it waits for the step
    AFTER_STEP = auto()  #: it came after the step, as it should
    BEFORE_STEP = auto()  #: it came without a step, which must not follow any more


class AfterStep(ParameterAverage):
    """Communicates once for each iteration that `meets_others`, after all parameters with a gradient were stepped.

    If no optimizer steps, as when a GradScaler skips a step, it communicates when the next forward begins or a
    checkpoint is taken. Ranks need not agree on whether a step follows: each of them communicates once. So if a rank
    may skip a step that others make, nothing else may be sent between the ranks until then. A step that still follows
    is an error, since the parameters were sent without it.
    """

    def __init__(self, process_group: dist.ProcessGroup, interval: int, warmup_steps: int = 0) -> None:
        super().__init__(process_group, interval, warmup_steps)
        self._exchange = Exchange.NONE

    @abstractmethod
    def communicate(self) -> None:
        """Exchange with the other ranks: an iteration has ended, and its step was done or skipped."""

    def before_forward(self, synchronize: bool) -> None:
        if synchronize and not self._steps.forward_begins(self.name):
            self._communicate_if_due()

    def after_backward(self) -> None:
        """Communicate after the next step. If the previous iteration's exchange is still due, communicate now."""
        self._communicate_if_due()  # after a backward without a forward, if nothing has stepped since
        self._exchange = Exchange.DUE if self.meets_others else Exchange.NONE
        super().after_backward()

    def state_dict(self) -> dict[str, Any]:
        """The number of steps. Every rank calls it."""
        self._finish_exchanges()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._exchange = Exchange.NONE

    def _finish_exchanges(self) -> None:
        self._communicate_if_due()

    def _communicate_if_due(self) -> None:
        if self._exchange is Exchange.DUE:
            self._exchange = Exchange.NONE
            self.communicate()
            self._exchange = Exchange.BEFORE_STEP

    def _step_begins(self) -> None:
        if self._exchange is Exchange.BEFORE_STEP and self._steps.has_gradients:
            raise ReductionError(
                f"{this_rank()}: an optimizer is about to step after the {self.name} has sent the parameters for this"
                " step, so the ranks' parameters would differ. A forward with gradients, or"
                " model.comm_algorithm.state_dict(), came between the backward and the step, so the step was taken to"
                " be skipped. Put such a forward into torch.no_grad() or model.no_sync(), or before the backward; take"
                " checkpoints after the step"
            )

    def _step_ends(self) -> None:
        if self._steps.all_have_stepped and self._exchange is not Exchange.NONE:
            self._communicate_if_due()
            self._exchange = Exchange.AFTER_STEP
