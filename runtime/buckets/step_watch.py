"""Calls an algorithm after an optimizer's step."""

import weakref
from collections.abc import Mapping
from enum import Enum, auto

from torch.nn import Parameter

from ddp_compile.errors import ReductionError, this_rank
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm
from ddp_compile.runtime.buckets.optimizer_steps import OptimizerSteps


class Call(Enum):
    """The state of the last iteration's call of `CommAlgorithm.after_step`."""

    NONE = auto()  #: there is none
    DUE = auto()  #: it waits for the step
    AFTER_STEP = auto()  #: it came after the step, as it should
    BEFORE_STEP = auto()  #: it came without a step, which must not follow any more


class StepWatch(OptimizerSteps):
    """Calls `CommAlgorithm.after_step` once for each iteration that `meets_others`.

    It is called as soon as all parameters with a gradient were stepped. If no optimizer steps, as when a GradScaler
    skips a step, it is called when the next forward begins or a checkpoint is taken. Ranks need not agree on whether a
    step follows: each of them calls it once. So if a rank may skip a step that others make, nothing else may be sent
    between the ranks until then. A step that still follows is an error, since the algorithm has communicated without
    it, and so is a second step, which the other ranks may not make.

    The algorithm is not kept alive. ``parameters`` are as for `CommAlgorithm.attach`.
    """

    def __init__(self, algorithm: CommAlgorithm, parameters: Mapping[str, Parameter]) -> None:
        super().__init__(list(parameters.values()))
        self._of = weakref.ref(algorithm)
        self._call = Call.NONE

    def forward_begins(self, synchronize: bool) -> None:
        """Before `CommAlgorithm.before_forward`; raises a ReplicationError in the second iteration inside one step."""
        if synchronize:
            if not self.is_inside_step(self._algorithm.name):
                self.call_if_due()
        elif not self.is_stepping and not self.has_gradients_left:
            # The step was skipped and its gradients are gone: parameters must not change after this micro-batch.
            self.call_if_due()

    def iteration_ends(self) -> None:
        """Before `CommAlgorithm.after_backward`."""
        self.call_if_due()  # after a backward without a forward, if nothing has stepped since
        self._call = Call.DUE if _listens(self._algorithm) and self._algorithm.meets_others else Call.NONE
        super().iteration_ends()

    def call_if_due(self) -> None:
        if self._call is Call.DUE:
            self._call = Call.BEFORE_STEP
            self._algorithm.after_step(self.stepped)

    def forget(self) -> None:
        """A checkpoint was loaded: what it continues is not the last iteration."""
        self._call = Call.NONE

    @property
    def _algorithm(self) -> CommAlgorithm:
        algorithm = self._of()
        assert algorithm is not None, "an algorithm outlives its watch"
        return algorithm

    def step_begins(self) -> None:
        if self._call is Call.BEFORE_STEP and self.has_gradients:
            raise ReductionError(
                f"{this_rank()}: an optimizer is about to step after the {self._algorithm.name} has sent the parameters"
                " for this step, so the ranks' parameters would differ. A forward with gradients, or"
                " model.comm_algorithm.state_dict(), came between the backward and the step, so the step was taken to"
                " be skipped. Put such a forward into torch.no_grad() or model.no_sync(), or before the backward; take"
                " checkpoints after the step"
            )

    def step_ends(self) -> None:
        if self._call is Call.AFTER_STEP and self.has_gradients:
            raise ReductionError(
                f"{this_rank()}: an optimizer has stepped again after the {self._algorithm.name} has sent the"
                " parameters, so the ranks' parameters differ. Take one step of each optimizer for each backward that"
                " is reduced, and start again from a checkpoint"
            )
        if self._call is not Call.NONE and self.all_have_stepped:
            self.call_if_due()
            self._call = Call.AFTER_STEP


def attach(algorithm: CommAlgorithm, parameters: Mapping[str, Parameter]) -> None:
    """Attach an algorithm, and watch optimizers for it if its ranks' steps may differ or it listens to them."""
    algorithm.attach(parameters)
    if _listens(algorithm) or algorithm.traits.payload != "gradients":
        algorithm.step_watch = StepWatch(algorithm, parameters)


def detach(algorithm: CommAlgorithm, together: bool) -> None:
    """Detach it, see `CommAlgorithm.detach`, after the call that is due."""
    if (watch := algorithm.step_watch) is not None:
        algorithm.step_watch = None
        watch.stop()
        if together:
            watch.call_if_due()
    algorithm.detach(together)


def _listens(algorithm: CommAlgorithm) -> bool:
    return type(algorithm).after_step is not CommAlgorithm.after_step
