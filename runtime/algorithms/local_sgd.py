"""Local SGD: averages gradients at first, and then parameters after each period of steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.optim import Optimizer

from ddp_compile.algorithms import FLOATING, AlgorithmConfig, Traits, average_over
from ddp_compile.runtime.algorithms.parameter_average import ParameterAverage, refuse_interval


class LocalSGDAlgorithm(ParameterAverage):
    """Gradient all-reduce in warm-up, then the average of the parameters after each period of local steps.

    Source: the steps in which ``PeriodicModelAverager`` of torch 2.13 averages
    (distributed/algorithms/model_averaging/averagers.py). It is not called: it leaves out parameters without gradients,
    which may differ from rank to rank, and replaces the storages of the others by views of one buffer, which are
    contiguous but not aligned.
    """

    traits = Traits(payload="both", takes_sparse=False, takes_dtypes=FLOATING)

    def __init__(self, process_group: dist.ProcessGroup, period: int, warmup_steps: int) -> None:
        super().__init__(process_group, period, warmup_steps)
        self.name = f"local SGD (period {period} after {warmup_steps} steps)"

    def after_step(self, optimizers: Sequence[Optimizer]) -> None:
        average_over(self.group, self.parameters, self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGD(AlgorithmConfig):
    """Every rank trains by itself. After each period of steps, all parameters become their mean over the ranks.

    Args:
        period: Number of steps from one average to the next.
        warmup_steps: Number of steps in which gradients are averaged first, as by ``GradientAllReduce()``.

    Raises:
        ValueError: A number is out of range.
    """

    period: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        refuse_interval("LocalSGD", "period", self.period)
        refuse_interval("LocalSGD", "warmup_steps", self.warmup_steps, least=0)

    def build(self, process_group: dist.ProcessGroup) -> LocalSGDAlgorithm:
        return LocalSGDAlgorithm(process_group, self.period, self.warmup_steps)
