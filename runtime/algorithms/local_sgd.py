"""Local SGD: gradients are averaged at first, and then parameters now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.nn import Parameter

from ddp_compile.runtime.algorithms.after_step import AfterStep
from ddp_compile.runtime.algorithms.all_reduce import AllReduce
from ddp_compile.runtime.algorithms.flat_parameters import FLOATING, FlatParameters, average_over
from ddp_compile.runtime.algorithms.peers import refuse_interval, refuse_state_of_another
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.comm_algorithm import AlgorithmConfig, Pending, Traits
from ddp_compile.runtime.comm.process_groups import group_of


class LocalSGDAlgorithm(AfterStep):
    """Gradient all-reduce for some steps, then the average of the parameters after each period of local steps.

    Args:
        process_group: All ranks.
        period: See `LocalSGD`.
        warmup_steps: See `LocalSGD`.

    Source: the steps in which ``PeriodicModelAverager`` of torch 2.13 averages
    (distributed/algorithms/model_averaging/averagers.py). It is not called: it leaves out parameters whose gradients
    are gone, which may be others on each rank, and replaces the storages of the rest by views into one buffer, which
    are contiguous and not aligned.
    """

    traits = Traits(payload="both", takes_sparse=False, takes_dtypes=FLOATING)

    def __init__(self, process_group: dist.ProcessGroup, period: int, warmup_steps: int) -> None:
        super().__init__(process_group)
        self.name = f"local SGD (period {period} after {warmup_steps} steps)"
        self._all_reduce = AllReduce(process_group)
        self._period = period
        self._warmup_steps = warmup_steps
        self._num_steps = 0

    @property
    def sends_gradients(self) -> bool:
        """Whether it is one of the first steps."""
        return self._num_steps < self._warmup_steps

    @property
    def meets_others(self) -> bool:
        """Whether a period ends with this step."""
        return not self.sends_gradients and (self._num_steps - self._warmup_steps) % self._period == 0

    def attach(self, parameters: Sequence[Parameter]) -> None:
        """Take a process group of its own: what comes between two steps is not in one order on every rank."""
        super().attach(parameters)
        ranks = dist.get_process_group_ranks(self._process_group)
        self._group = group_of(ranks, self._process_group, parameters[0].device)
        self._parameters = FlatParameters(parameters)

    def detach(self, together: bool) -> None:
        """Average over all ranks, see `CommAlgorithm.detach`."""
        super().detach(together)
        if together:
            average_over(self._process_group, self._parameters, self._failed)

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        """See `CommAlgorithm.launch`."""
        return self._all_reduce.launch(bucket, is_last)

    def after_backward(self) -> None:
        """See `AfterStep.after_backward`."""
        super().after_backward()
        self._num_steps += 1

    def communicate(self) -> None:
        """Average: a period ends with the step that was done."""
        average_over(self._group, self._parameters, self._failed)

    def state_dict(self) -> dict[str, Any]:
        """The number of steps; to be called on every rank."""
        self.pay()
        return {"algorithm": type(self).__name__, "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `CommAlgorithm.load_state_dict`."""
        refuse_state_of_another(self, state)
        self.owe_nothing()
        self._num_steps = state["num_steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGD(AlgorithmConfig):
    """Every rank trains by itself, and after each period of steps all parameters become their mean over the ranks.

    Args:
        period: How many steps there are from one average to the next.
        warmup_steps: In how many steps gradients are averaged first, as by ``GradientAllReduce()``.

    Raises:
        ValueError: A number is out of range.
    """

    period: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        refuse_interval("LocalSGD", "period", self.period)
        refuse_interval("LocalSGD", "warmup_steps", self.warmup_steps, least=0)

    def build(self, process_group: dist.ProcessGroup) -> LocalSGDAlgorithm:
        """See `AlgorithmConfig.build`."""
        return LocalSGDAlgorithm(process_group, self.period, self.warmup_steps)
