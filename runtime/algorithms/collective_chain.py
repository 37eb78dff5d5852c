"""Algorithms that send a bucket by several collectives, each of which needs what the one before has brought."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_compile.errors import ReductionError
from ddp_compile.runtime import error_messages
from ddp_compile.runtime.algorithms.base import CommAlgorithm, Pending
from ddp_compile.runtime.bucket import Bucket
from ddp_compile.runtime.process_groups import group_of


class CollectiveChain(CommAlgorithm):
    """One after the other, for each bucket; to derive from, with a generator `reduce` of what is done to a bucket.

    On the CPU the next collective of a bucket starts when the bucket behind it is launched, that of the last bucket at
    once, or before the reducer waits: what is under way meanwhile is hidden behind the backward. That is in the same
    order on every rank for one module, and at no certain place between what else a rank sends in its backward: the
    collectives of another module, or of the user. So a chain of several has a process group of its own. On CUDA all of
    them start at once, on a stream of the algorithm's own, where NCCL lets that stream wait and not the host.

    Args:
        process_group: The ranks to reduce over.
    """

    #: How many collectives `reduce` yields for a bucket on this rank, the same for every bucket.
    num_collectives: int

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self._under_way: _Chain | None = None  # whose last collective has not been started
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @abstractmethod
    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        """Start each collective with ``async_op=True`` and yield its work; go on when it has been waited for.

        Args:
            bucket: As for `CommAlgorithm.launch`. ``bucket.flat`` has to hold the result when the generator ends.
        """

    def attach(self, parameters: Sequence[Parameter]) -> None:
        """Take a process group of its own for several collectives; it stays until all groups are destroyed."""
        if self.num_collectives > 1:
            self.take_own_group(parameters)

    def take_own_group(self, parameters: Sequence[Parameter]) -> None:
        """Send over a group of the same ranks that nobody else uses; there is no need of one for a single rank."""
        if self.process_group.size() > 1:
            ranks = dist.get_process_group_ranks(self.process_group)
            self.process_group = group_of(ranks, self.process_group, parameters[0].device)
            self.shares_process_group = False

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        """Start the first collective of a bucket, after the last one of the bucket before; on CUDA all of them.

        Raises:
            ReductionError: What was under way has failed.
        """
        self.drain()
        if bucket.flat.is_cuda:
            return self._launch_on_own_stream(bucket)
        chain = self._under_way = _Chain(self, bucket)
        if is_last:
            # Modules of one backward come to their ends in another order on each rank: no rank may wait there for what
            # another one has yet to start. They come to their launches in one order.
            self.drain()
        return chain

    def drain(self) -> None:
        """Start what is left of the bucket launched last, but for what comes behind its last collective.

        Raises:
            ReductionError: One of its collectives has failed.
        """
        chain, self._under_way = self._under_way, None
        if chain is not None:
            chain.start_all()

    def _launch_on_own_stream(self, bucket: Bucket) -> Pending:
        device = bucket.flat.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        bucket.flat.record_stream(stream)
        with torch.cuda.stream(stream):
            chain = _Chain(self, bucket)
            chain.wait()
            return _DoneOnStream(bucket.flat, stream.record_event())


class _Chain:
    """What is under way for one bucket."""

    def __init__(self, algorithm: CollectiveChain, bucket: Bucket) -> None:
        self._algorithm = algorithm
        self._bucket = bucket
        self._flat = bucket.flat
        self._steps = algorithm.reduce(bucket)
        self._num_started = 0
        self._work: dist.Work | None = None
        self._failure: ReductionError | None = None
        self._go_on()

    def start_all(self) -> None:
        """Start all collectives, and wait for all but the last one."""
        while self._num_started < self._algorithm.num_collectives:
            self._go_on()

    def wait(self) -> None:
        """Let the bucket hold the result; further calls do nothing, or say again what has failed."""
        self.start_all()
        if self._work is not None:
            self._go_on()

    def result(self) -> list[Tensor]:
        """The reduced flat buffer."""
        return [self._flat]

    def _go_on(self) -> None:
        """Wait for the collective under way, and let the generator do what comes behind it."""
        if self._failure is not None:
            raise self._failure
        try:
            self._wait_for_one()
            self._start_next()
        except ReductionError as failure:
            self._failure = failure
            raise

    def _wait_for_one(self) -> None:
        work, self._work = self._work, None
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            rank = self._algorithm.process_group.rank()
            raise error_messages.reduction_failed(rank, self._bucket.describe(), error) from error

    def _start_next(self) -> None:
        algorithm = self._algorithm
        try:
            self._work = next(self._steps, None)
        except ReductionError:
            raise
        except Exception as error:
            raise self._error(f"raised {error!r} on {self._bucket.describe()}; correct it") from error
        has_ended, has_to_end = self._work is None, self._num_started == algorithm.num_collectives
        self._num_started += not has_ended
        if has_ended != has_to_end:
            raise self._error(
                f"yielded {'fewer' if has_ended else 'more'} works than num_collectives = {algorithm.num_collectives}"
                f" for {self._bucket.describe()}; it has to yield the work of each collective, and num_collectives has"
                " to say how many these are"
            )

    def _error(self, what: str) -> ReductionError:
        return ReductionError(
            f"rank {self._algorithm.process_group.rank()}: reduce() of the {self._algorithm.name} {what}. The gradients"
            " are not reduced, and this rank may be out of step with the others: start again from a checkpoint"
        )


class _DoneOnStream:
    """A bucket whose result will be there when an event of another stream has come.

    Args:
        flat: Where the result will be.
        event: Behind all that is done to it.
    """

    def __init__(self, flat: Tensor, event: torch.cuda.Event) -> None:
        self._flat = flat
        self._event = event

    def wait(self) -> None:
        """Let the current stream wait; the host does not."""
        torch.cuda.current_stream(self._flat.device).wait_event(self._event)

    def result(self) -> list[Tensor]:
        """The reduced flat buffer."""
        return [self._flat]
