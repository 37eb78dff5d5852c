"""torchft: replicas that fail and come back while the others train on.

Note [Two levels]
A replica is a process group whose ranks live and die together, maybe of one rank. Its ranks agree on the bucket plan
and reduce each bucket as usual. Then each rank reduces the bucket with the ranks in its place in the other replicas,
through torchft's manager, which knows who takes part in the step. The manager pairs tensors by their order alone. So
every iteration launches all buckets of the plan, and between two messages: the first one compares plans and steps, and
the last one says that the backward has ended here. A replica whose backward raises does not send it, so the others do
not commit what it may have sent before.

This module does not import torchft: it calls the manager that it is given.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.errors import ReductionError, this_rank, with_article
from ddp_compile.runtime.algorithms.collective_chain import CollectiveChain
from ddp_compile.runtime.algorithms.flat_parameters import FLOATING
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.comm_algorithm import AlgorithmConfig, CommAlgorithm, Traits
from ddp_compile.runtime.desync.replicas import BitSums

# A value v travels as v and _LIMIT - v, whose maxima are the largest value and _LIMIT minus the smallest one. A replica
# that does not take part sends zeros, which change neither.
_LIMIT = 2**60
_COMPARED = ("bucket plan", "number of parameters", "of values", "step", "ended backwards", "checksum of parameters")


@runtime_checkable
class ReplicaManager(Protocol):
    """The methods of a ``torchft.Manager`` that are called."""

    def allreduce(self, tensor: Tensor, *, reduce_op: Any = ...) -> Any: ...

    def wait_quorum(self) -> None: ...

    def errored(self) -> object: ...

    def current_step(self) -> int: ...


class ManagedAllReduceAlgorithm(CollectiveChain):
    """Averages each bucket over the ranks of a replica, then over the replicas that take part in the step."""

    name = "gradient all-reduce over managed replicas"
    traits = Traits(
        replayable=False,
        on_one_rank=True,
        takes_sparse=False,
        takes_dtypes=FLOATING,
        keeps_buckets=True,  # a replica that comes later packs its buckets for the first time
        beyond_group=True,
    )

    def __init__(self, process_group: dist.ProcessGroup, manager: ReplicaManager) -> None:
        super().__init__(process_group)
        self.num_collectives = 1 if process_group.size() == 1 else 2
        self._manager = manager
        self._parameters: list[Parameter] = []
        self._values: tuple[int, ...] = ()  # that are compared in this iteration
        self._comparisons: list[_Comparison] = []  # under way
        self._is_newcomer = True  # has not compared anything yet

    def attach(self, parameters: Mapping[str, Parameter]) -> None:
        super().attach(parameters)
        self._parameters = list(parameters.values())

    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        if bucket.spec.index == 0:
            self._manager.wait_quorum()  # the step of a replica that heals is not known before
            step, num_values = self._manager.current_step(), sum(parameter.numel() for parameter in self._parameters)
            self._values = (int(bucket.plan_digest[:15], 16), len(self._parameters), num_values, step)
            # Later on replicas have got the state of one that has trained; at first their seeds may differ.
            checksum = 1 + int(BitSums([self._parameters]).text(), 16) % (_LIMIT - 1) if step == 0 else 0
            self._comparisons = [self._compare(0, checksum)]
            if self._is_newcomer:
                # Other buckets would end processes: gloo terminates them. Those that have trained go on without it.
                self._end_comparisons()
        if self.num_collectives == 2:
            yield torch_internals.started(dist.all_reduce(bucket.flat, group=self.process_group, async_op=True))
        yield self._manager.allreduce(bucket.flat)

    def after_backward(self) -> None:
        assert self._side_stream is not None  # buckets were launched
        with self._side_stream.on():
            self._comparisons.append(self._compare(1, 0))
            self._end_comparisons()

    def _compare(self, num_ended: int, checksum: int) -> "_Comparison":
        values = (*self._values, num_ended, checksum)
        sent = torch.tensor([*values, *(_LIMIT - value for value in values)], device=self._parameters[0].device)
        if self.num_collectives == 2 and not num_ended:  # torchft may bring the ranks of a replica apart
            dist.all_reduce(sent, dist.ReduceOp.MAX, group=self.process_group)
        return _Comparison(self._manager, values, sent)

    def _end_comparisons(self) -> None:
        comparisons, self._comparisons = self._comparisons, []
        for comparison in comparisons:
            if comparison.succeeds():
                self._is_newcomer = False


class _Comparison:
    """Tells whether this replica and those that take part have the same values."""

    def __init__(self, manager: ReplicaManager, values: tuple[int, ...], sent: Tensor) -> None:
        self._manager = manager
        self._values = values
        self._sent = sent
        self._work = manager.allreduce(sent, reduce_op=dist.ReduceOp.MAX)

    def succeeds(self) -> bool:
        """Wait; False if the manager has an error, after which ``should_commit`` refuses the step.

        Raises a ReductionError if the values differ.
        """
        self._work.wait()
        if self._manager.errored() is not None:
            return False
        heard, num = self._sent.tolist(), len(self._values)
        largest, smallest = heard[:num], [_LIMIT - value for value in heard[num:]]
        rows = zip(_COMPARED, self._values, smallest, largest, strict=True)
        if differing := [_difference(name, *values) for name, *values in rows if len(set(values)) > 1]:
            raise ReductionError(
                f"{this_rank()}: the replicas differ: {'; '.join(differing)}. The gradients of this step must not be"
                " used. Start every replica with the same model, settings, versions and seed, and with the same"
                " bucket_plan= if only the plans differ; call should_commit() once after each backward"
            )
        return True


def _difference(name: str, here: int, smallest: int, largest: int) -> str:
    is_hash = name in ("bucket plan", "checksum of parameters")
    texts = [f"{value:015x}" if is_hash else str(value) for value in (here, smallest, largest)]
    return "{} {} here, from {} to {} in the replicas that take part".format(name, *texts)


@dataclass(frozen=True, slots=True)
class ManagedAllReduce(AlgorithmConfig):
    """Average gradients over replicas that may fail and come back while the others train on::

        manager = torchft.Manager(pg=torchft.ProcessGroupGloo(), min_replica_size=1, ...)
        model = ddp_compile(model, process_group=group, algorithm=ManagedAllReduce(manager))

    The ranks of ``group`` are those of one replica. Each ``.grad`` is the mean over all ranks of the replicas that take
    part in the step; step only if ``manager.should_commit()``. docs/integrations.md shows the loop.

    Args:
        manager: A ``torchft.Manager``.

    Raises:
        TypeError: It lacks a method that is called.
    """

    manager: ReplicaManager

    def __post_init__(self) -> None:
        if not isinstance(self.manager, ReplicaManager):
            raise TypeError(
                f"manager={self.manager!r} is {with_article(type(self.manager).__name__)}; pass a torchft.Manager"
            )

    def build(self, process_group: dist.ProcessGroup) -> CommAlgorithm:
        """A new algorithm for one module, over the ranks of one replica."""
        return ManagedAllReduceAlgorithm(process_group, self.manager)
