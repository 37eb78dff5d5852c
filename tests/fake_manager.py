"""A manager of replicas that has the protocol of torchft's, over process groups of the test."""

from typing import Any

import torch.distributed as dist
from torch import Tensor


class FakeManager:
    """Reduces over whatever group the test says takes part: what `torchft.Manager` does, without a lighthouse.

    As there, a replica that heals sends zeros, sums are divided by the number of those that take part, and after an
    error nothing is sent until the next step.
    """

    def __init__(self) -> None:
        self.step = 0
        self.num_sent = 0  #: collectives that were started
        self._error: Exception | None = None

    def start_quorum(self, group: dist.ProcessGroup, num: int | None = None, heals_to: int | None = None) -> None:
        """Begin a step of ``num`` replicas, by default all in ``group``; `wait_quorum` heals this one to a step."""
        self._group, self._heals_to, self._error = group, heals_to, None
        self._num = num or group.size()

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, reduce_op: Any = dist.ReduceOp.AVG) -> Any:
        if self._error is not None:
            return _Managed(self, None, tensor, 1)
        self.wait_quorum()
        if self._heals_to is not None:
            tensor.zero_()
        self.num_sent += 1
        is_mean = reduce_op == dist.ReduceOp.AVG
        work = dist.all_reduce(tensor, dist.ReduceOp.SUM if is_mean else reduce_op, self._group, async_op=True)
        return _Managed(self, work, tensor, self._num if is_mean else 1)

    def wait_quorum(self) -> None:
        if self._heals_to is not None:
            self.step = self._heals_to

    def errored(self) -> Exception | None:
        return self._error

    def report_error(self, error: Exception) -> None:
        self._error = error

    def current_step(self) -> int:
        return self.step

    def should_commit(self) -> bool:
        self.step += self._error is None
        return self._error is None


class _Managed:
    """Its ``wait`` divides, and keeps errors for the manager."""

    def __init__(self, manager: FakeManager, work: Any, tensor: Tensor, divisor: int) -> None:
        self._manager, self._work, self._tensor, self._divisor = manager, work, tensor, divisor

    def wait(self) -> bool:
        if self._work is None:
            return True
        try:
            self._work.wait()
        except RuntimeError as error:
            self._manager.report_error(error)
            return False
        if self._divisor > 1:
            self._tensor /= self._divisor
        return True
