"""Algorithms that send a bucket by several collectives, each of which needs what the one before has brought."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile.errors import ReductionError
from ddp_compile.runtime import error_messages
from ddp_compile.runtime.algorithms.base import CommAlgorithm, Pending
from ddp_compile.runtime.bucket import Bucket


class CollectiveChain(CommAlgorithm):
    """One after the other, for each bucket; to derive from, with a generator `reduce` of what is done to a bucket.

    Collectives have to start in one order on every rank, and a rank may wait for a bucket while another one still
    computes. So on the CPU the next collective of a bucket starts when the bucket behind it is launched, or before the
    reducer waits: the one that is under way meanwhile is hidden behind the backward, and so is the last one. On CUDA
    all of them start at once, on a stream of the algorithm's own, where to wait for one holds back that stream alone.

    Args:
        process_group: The ranks to reduce over.
    """

    #: How many collectives `reduce` yields for a bucket on this rank, the same for every bucket.
    num_collectives: int

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self._under_way: _Chain | None = None  # whose last collective has not been started
        self._stream: torch.cuda.Stream | None = None

    @abstractmethod
    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        """Start each collective with ``async_op=True`` and yield its work; go on when it has been waited for.

        Args:
            bucket: As for `CommAlgorithm.launch`. ``bucket.flat`` has to hold the result when the generator ends.
        """

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        """Start the first collective of a bucket, after the last one of the bucket before; on CUDA all of them.

        Raises:
            ReductionError: What was under way has failed.
        """
        self.drain()
        if bucket.flat.is_cuda:
            return self._launch_on_own_stream(bucket)
        self._under_way = _Chain(self, bucket)
        return self._under_way

    def drain(self) -> None:
        """Start what is left of the bucket launched last, but for what comes behind its last collective.

        Raises:
            ReductionError: One of its collectives has failed.
        """
        chain, self._under_way = self._under_way, None
        if chain is not None:
            chain.start_all()

    def _launch_on_own_stream(self, bucket: Bucket) -> Pending:
        if self._stream is None:
            self._stream = torch.cuda.Stream(bucket.flat.device)
        self._stream.wait_stream(torch.cuda.current_stream(bucket.flat.device))
        bucket.flat.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            chain = _Chain(self, bucket)
            chain.wait()
            return _DoneOnStream(bucket.flat, self._stream.record_event())


class _Chain:
    """What is under way for one bucket."""

    def __init__(self, algorithm: CollectiveChain, bucket: Bucket) -> None:
        self._algorithm = algorithm
        self._bucket = bucket.describe()
        self._flat = bucket.flat
        self._steps = algorithm.reduce(bucket)
        self._num_started = 0
        self._work: dist.Work | None = None
        self._go_on()

    def start_all(self) -> None:
        """Start all collectives, and wait for all but the last one."""
        while self._num_started < self._algorithm.num_collectives:
            self._go_on()

    def wait(self) -> None:
        """Let the bucket hold the result; further calls do nothing."""
        self.start_all()
        if self._work is not None:
            self._go_on()

    def result(self) -> list[Tensor]:
        """The reduced flat buffer."""
        return [self._flat]

    def _go_on(self) -> None:
        """Wait for the collective under way, and let the generator do what comes behind it."""
        work, self._work = self._work, None
        try:
            if work is not None:
                work.wait()
            self._work = next(self._steps, None)
        except RuntimeError as error:
            rank = self._algorithm.process_group.rank()
            raise error_messages.reduction_failed(rank, self._bucket, error) from error
        has_ended, has_to_end = self._work is None, self._num_started == self._algorithm.num_collectives
        self._num_started += not has_ended
        if has_ended != has_to_end:
            raise ReductionError(
                f"rank {self._algorithm.process_group.rank()}: reduce() of the {self._algorithm.name} yielded"
                f" {'fewer' if has_ended else 'more'} works than num_collectives ="
                f" {self._algorithm.num_collectives} for {self._bucket}; on every rank it has to yield the work of each"
                " collective, and num_collectives has to say how many these are"
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
