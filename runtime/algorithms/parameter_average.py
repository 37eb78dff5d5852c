"""Base of the algorithms that average parameters."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.nn import Parameter

from ddp_compile.algorithms import (
    AllReduce,
    Bucket,
    CommAlgorithm,
    FlatParameters,
    NodeGroups,
    Pending,
    average_over,
    device_of,
)


class ParameterAverage(CommAlgorithm):
    """Base class: averages gradients in warm-up, if there is one, and communicates parameters after it.

    Steps are counted by iterations: backwards that are reduced. A subclass communicates in those that `meets_others`:
    in `before_forward`, `after_backward` or `after_step`. In `detach`, parameters become their mean over the ranks.

    Args:
        process_group: Of the module.
        interval: Parameters are sent in each ``interval``-th step after warm-up.
        warmup_steps: Number of steps in which gradients are averaged.
        hierarchical: Whether a subclass communicates on each node first, over ``nodes``; otherwise over ``group``.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, interval: int = 1, warmup_steps: int = 0, hierarchical: bool = False
    ) -> None:
        self.process_group = process_group
        self._hierarchical = hierarchical
        self.group: Any = None  # set by `attach`
        self.interval = interval
        self._warmup_steps = warmup_steps
        self.num_steps = 0
        self._all_reduce = AllReduce(process_group)

    @property
    def sends_gradients(self) -> bool:
        return self.num_steps < self._warmup_steps

    @property
    def meets_others(self) -> bool:
        """Whether parameters are sent in this step: the first after warm-up, and every ``interval``-th from there."""
        return super().meets_others and (self.num_steps - self._warmup_steps) % self.interval == 0

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        """See `CommAlgorithm.launch`; only called in warm-up."""
        return self._all_reduce.launch(bucket, is_last)

    def attach(self, parameters: Mapping[str, Parameter]) -> None:
        """Make the process groups, over which nothing else is sent; raises on every rank if nodes are unknown."""
        self.device = device_of(parameters)
        self.nodes = NodeGroups.of(self.process_group, self.device, self.name, self._hierarchical)
        self.group = self.process_group if self._hierarchical else self.nodes.leaders
        self.parameters = FlatParameters(list(parameters.values()))

    def detach(self, together: bool) -> None:
        """Replace the parameters by their mean over all ranks, see `CommAlgorithm.detach`."""
        if together:
            self.finish_exchanges()
            average_over(self.process_group, self.parameters, self.name)

    def finish_exchanges(self) -> None:
        """Leave nothing under way; called on every rank."""

    def after_backward(self) -> None:
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        """The number of steps. Every rank calls it."""
        return {**super().state_dict(), "algorithm": type(self).__name__, "num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `CommAlgorithm.load_state_dict`; the settings may differ."""
        self.refuse_state(state)
        self.num_steps = state["num_steps"]
        super().load_state_dict({})

    def refuse_state(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError if this is the state of another algorithm, or of other parameters."""
        given = state.get("algorithm", "unknown algorithm")
        if given != type(self).__name__:
            raise ValueError(
                f"the {self.name} was given the state of {given}, but needs that of {type(self).__name__}; load it into"
                " the algorithm whose state_dict() it is"
            )


def refuse_interval(config: str, name: str, value: object, least: int = 1) -> None:
    """Raise a ValueError unless a number of steps is a whole number, and not too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{config}({name}={value!r}): pass a number of steps from {least} on")
