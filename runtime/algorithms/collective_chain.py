"""Algorithms that send a bucket by several collectives, each of which needs the result of the one before."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_compile.errors import ReductionError, this_rank
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm, Pending, Traits, device_of
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.exchange import Exchange
from ddp_compile.runtime.comm.process_groups import NodeGroups, own_group
from ddp_compile.runtime.comm.streams import Event, SideStream, record, work_blocks_host


class CollectiveChain(CommAlgorithm):
    """Base class: the generator `reduce` runs the collectives of a bucket one after the other.

    If a collective's ``wait()`` blocks the host, as gloo's does, the next collective of a bucket starts when the next
    bucket is launched, or before the reducer waits; those of the last bucket start at once. So the backward continues
    during a transfer. Every rank starts the collectives of one module in the same order, but may interleave them
    differently with those of other modules or of the user. So a chain of several has a process group of its own. If
    ``wait()`` holds up a stream instead, as NCCL's does, all of them start at once, on a stream of the algorithm's own.
    """

    #: How many collectives `reduce` yields for a bucket on this rank, the same for every bucket.
    num_collectives: int

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self._under_way: _Chain | None = None  # a chain whose last collective has not been started
        self._side_stream: SideStream | None = None  # from the first launch on

    @abstractmethod
    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        """Start each collective with ``async_op=True`` and yield its work. The generator is resumed when the work has
        been waited for.

        Args:
            bucket: As for `CommAlgorithm.launch`. ``bucket.flat`` has to hold the result when the generator ends.
        """

    def attach(self, parameters: Mapping[str, Parameter]) -> None:
        """Make a process group of its own if there are several collectives. It exists until all groups are
        destroyed."""
        if self.num_collectives > 1:
            self.take_own_group(parameters)

    def take_own_group(self, parameters: Mapping[str, Parameter]) -> None:
        """Send over a process group of the same ranks that nothing else uses; a single rank needs none."""
        if self.process_group.size() > 1:
            self.process_group = own_group(self.process_group, device_of(parameters))
            self.shares_process_group = False

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        """Start the first collective of a bucket, after the last one of the previous bucket; see the class."""
        self.drain()
        device = bucket.flat.device
        if self._side_stream is None:
            self._side_stream = SideStream(device)
        chain = _Chain(self, bucket, self._side_stream)
        with self._side_stream.after_current():
            chain.go_on()
        if not work_blocks_host(self.process_group, device):
            chain.finish()
            return chain
        self._under_way = chain
        if is_last:
            # All ranks launch the modules of one backward in the same order, but may finish them in different orders.
            # So at the end no rank may wait for a collective that another rank has not started.
            self.drain()
        return chain

    def drain(self) -> None:
        """Start the remaining collectives of the bucket launched last, and wait for all but the last one."""
        chain, self._under_way = self._under_way, None
        if chain is not None:
            chain.start_all()


class Hierarchical(CollectiveChain):
    """Runs another algorithm between the leaders of the nodes, on the sum of each node.

    Buckets arrive divided by the number of all ranks, so the sum of the nodes' sums is the mean, however many ranks a
    node has. All ranks of a node get their leader's result, bit for bit.

    Args:
        between: Runs between the leaders; `attach` gives it their process group.
    """

    def __init__(self, process_group: dist.ProcessGroup, between: CollectiveChain) -> None:
        super().__init__(process_group)
        self.num_collectives = 0  # set by `attach`
        self.name = f"hierarchical {between.name}"
        self.traits = Traits(layout=between.traits.layout, takes_sparse=False, takes_dtypes=between.traits.takes_dtypes)
        self._between = between
        self._nodes: Any = None  # set by `attach`

    def attach(self, parameters: Mapping[str, Parameter]) -> None:
        """Make the groups of nodes and leaders; raises on every rank if one does not know its place on its node."""
        nodes: Any = NodeGroups.of(self.process_group, device_of(parameters), self.name)
        self._nodes = nodes
        self.shares_process_group = False
        self.num_collectives = 0 if nodes.within is None else 2
        if self._sends_between:
            self._between.process_group = nodes.leaders
            self.num_collectives += self._between.num_collectives

    def after_backward(self) -> None:
        self._between.after_backward()

    @property
    def _sends_between(self) -> bool:
        return self._nodes.leaders is not None and self._nodes.leaders.size() > 1

    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        flat, nodes = bucket.flat, self._nodes
        if (work := nodes.reduce(flat)) is not None:
            yield work
        if self._sends_between:
            yield from self._between.reduce(bucket)
        if (work := nodes.broadcast(flat)) is not None:
            yield work


class _Chain:
    """The collectives of one bucket, started on a side stream."""

    def __init__(self, algorithm: CollectiveChain, bucket: Bucket, side_stream: SideStream) -> None:
        self._algorithm = algorithm
        self._side_stream = side_stream
        self._done: Event | None = None
        self._bucket = bucket
        self._flat = bucket.flat
        self._steps = algorithm.reduce(bucket)
        self._num_started = 0
        self._work: dist.Work | None = None
        self._failure: ReductionError | None = None

    @property
    def works(self) -> Sequence[dist.Work | Event] | None:
        """See `Pending`. If `wait()` blocks the host, the last of several collectives has yet to be started."""
        if self._done is not None:
            return [self._done] if self._done.stream is not None else []
        return [self._work] if self._work is not None and self._algorithm.num_collectives == 1 else None

    def start_all(self) -> None:
        """Start all collectives, and wait for all but the last one."""
        with self._side_stream.on():
            while self._num_started < self._algorithm.num_collectives:
                self.go_on()

    def finish(self) -> None:
        """Run the chain to its end."""
        with self._side_stream.on():
            while self._done is None:
                self.go_on()

    def wait(self) -> None:
        """Return when the bucket holds the result; further calls do nothing, or raise the same error again."""
        if self._done is None:
            self.finish()
        assert self._done is not None
        self._done.wait()

    def result(self) -> list[Tensor]:
        return [self._flat]

    def go_on(self) -> None:
        """Wait for the collective under way, if any, and start the next one."""
        if self._failure is not None:
            raise self._failure
        try:
            with Exchange(lambda error: error_messages.reduction_failed(self._bucket.describe(), error)):
                work, self._work = self._work, None
                if work is not None:
                    work.wait()
                self._start_next()
        except ReductionError as failure:
            self._failure = failure
            raise

    def _start_next(self) -> None:
        algorithm = self._algorithm
        try:
            self._work = self._bucket.call_by_name(next, self._steps, None)
        except ReductionError:
            raise
        except Exception as error:
            raise self._error(f"raised {error!r} on {self._bucket.describe()}; correct it") from error
        has_ended, has_to_end = self._work is None, self._num_started == algorithm.num_collectives
        self._num_started += not has_ended
        if has_ended != has_to_end:
            raise self._error(
                f"yielded {'fewer' if has_ended else 'more'} works than num_collectives = {algorithm.num_collectives}"
                f" for {self._bucket.describe()}; it must yield the work of each collective, and num_collectives must"
                " be their number"
            )
        if has_ended:
            self._done = record(self._flat.device)

    def _error(self, what: str) -> ReductionError:
        return ReductionError(
            f"{this_rank()}: reduce() of the {self._algorithm.name} {what}. The gradients"
            " are not reduced, and this rank may be out of step with the others: start again from a checkpoint"
        )
