"""Base of the algorithms that average parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.nn import Parameter

from ddp_compile.runtime.algorithms.all_reduce import AllReduce
from ddp_compile.runtime.algorithms.flat_parameters import FlatParameters, average_over
from ddp_compile.runtime.algorithms.optimizer_steps import OptimizerSteps
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm, Pending


class ParameterAverage(CommAlgorithm):
    """Averages gradients in warm-up, if there is one, and parameters after it.

    Steps are counted by iterations: backwards that are reduced.

    Args:
        interval: Parameters are sent in each ``interval``-th step after warm-up.
        warmup_steps: Number of steps in which gradients are averaged.
    """

    def __init__(self, process_group: dist.ProcessGroup, interval: int = 1, warmup_steps: int = 0) -> None:
        self._process_group = process_group
        self._interval = interval
        self._warmup_steps = warmup_steps
        self._num_steps = 0
        self._all_reduce = AllReduce(process_group)

    @property
    def sends_gradients(self) -> bool:
        return self._num_steps < self._warmup_steps

    @property
    def meets_others(self) -> bool:
        """Whether parameters are sent in this step."""
        return super().meets_others and (self._num_steps - self._warmup_steps) % self._interval == 0

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        """See `CommAlgorithm.launch`; only called in warm-up."""
        return self._all_reduce.launch(bucket, is_last)

    def attach(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = FlatParameters(parameters)
        self._steps = OptimizerSteps(parameters, self._step_begins, self._step_ends)

    def detach(self, together: bool) -> None:
        """Replace the parameters by their mean over all ranks, see `CommAlgorithm.detach`."""
        self._steps.stop()
        if together:
            self._finish_exchanges()
            average_over(self._process_group, self._parameters, self.name)

    def after_backward(self) -> None:
        self._num_steps += 1
        self._steps.iteration_ends()

    def state_dict(self) -> dict[str, Any]:
        return {"algorithm": type(self).__name__, "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `CommAlgorithm.load_state_dict`; the settings may differ."""
        self._refuse_state(state)
        self._num_steps = state["num_steps"]

    def _refuse_state(self, state: Mapping[str, Any]) -> None:
        given = state.get("algorithm", "unknown algorithm")
        if given != type(self).__name__:
            raise ValueError(
                f"the {self.name} was given the state of {given}, but needs that of {type(self).__name__}; load it into"
                " the algorithm whose state_dict() it is"
            )

    def _finish_exchanges(self) -> None:
        """Leave nothing under way or due; called on every rank."""

    def _step_begins(self) -> None:
        """An optimizer of some of the parameters is about to step."""

    def _step_ends(self) -> None:
        """It has stepped."""


def refuse_interval(config: str, name: str, value: object, least: int = 1) -> None:
    """Raise a ValueError unless a number of steps is a whole number, and not too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{config}({name}={value!r}): pass a number of steps from {least} on")
