"""The reducer's hook on each parameter."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.runtime.arrivals.accumulators import Accumulators
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.iteration import BucketIteration


class ArrivalListener(Protocol):
    """The reducer, as far as the hooks know it."""

    def mark_parameter_ready(self, index: int) -> None: ...

    def hooks_have_run(self, *_: object) -> None: ...


_Slot = tuple[OrderedDict[int, Callable[[Tensor], None]], int, Callable[[Tensor], None]]


class ParameterHooks:
    """Notifies a listener of the gradients that matter to it, and batches the others.

    Parameters are numbered by their places in ``parameters``. The listener is not kept alive.

    Note [One of many]
    With thousands of small parameters, hooks are what a reducer costs: a microsecond or two for a Python function and
    what it does, since the backward has pushed it out of the caches. Of a bucket's gradients only two need
    thought: the one that begins a backward and the one that completes the bucket. So after the first one of a backward
    the reducer calls `batch`, and then the hook of nearly every parameter is the ``append`` of a list, which runs no
    Python code. Only the parameter that came last in its bucket the time before notifies the listener, which first
    calls `flush` to count what has been batched. If some are still missing, the order has changed, and the parameters
    of that bucket notify one by one for the rest of the backward. `notify_of_each` ends all batching.
    """

    def __init__(self, parameters: Sequence[Parameter], accumulators: Accumulators, listener: ArrivalListener) -> None:
        # A strong reference would make a cycle through C++ (parameter, hook, reducer, parameter) that gc cannot see.
        self._listener = weakref.ref(listener)
        self._notify = [_hook_for(self._listener, index) for index in range(len(parameters))]
        self._handles = [
            torch_internals.register_own(parameter.register_post_accumulate_grad_hook, notify)
            for parameter, notify in zip(parameters, self._notify, strict=True)
        ]
        self._all_hooks = [torch_internals.post_accumulate_grad_hooks(parameter) for parameter in parameters]
        self._accumulators = accumulators
        self._notify_after_others = torch_internals.while_alive(listener.hooks_have_run)
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._batch_of: list[_Batch | None] = [None] * len(parameters)
        self._batching: dict[_Batch, None] = {}  # an ordered set; some batches have stopped

    def batch(self, bucket: Bucket, arriving: Sequence[int] = (), notify_of_last: bool = True) -> None:
        """Batch the gradients of one bucket from now on.

        The listener is being notified of ``arriving``. It hears of the last one to come if ``notify_of_last``.
        """
        param_indices = bucket.param_indices
        batch = self._batch_of[param_indices[0]]
        if batch is None or batch.bucket is not bucket:
            if batch is not None:  # of an earlier plan
                batch.notify_of_each()
            slots = [(self._all_hooks[index], self._handles[index].id, self._notify[index]) for index in param_indices]
            batch = _Batch(bucket, slots)
            for index in param_indices:
                self._batch_of[index] = batch
        batch.begin(arriving, notify_of_last)
        self._batching[batch] = None

    def flush(self, index: int) -> Sequence[int]:
        """After a notification, count the batched gradients of the parameter's bucket.

        Returns those that were no longer missing. The listener has to treat each as if it had been notified of it.
        """
        batch = self._batch_of[index]
        if batch is None:
            return ()
        again = self._count(batch)
        if again or (index == batch.last and len(batch.bucket.iteration.pending) > 1):
            batch.notify_of_each()
        return again

    def flush_all(self) -> Sequence[int]:
        """`flush` for all buckets; from now on the listener is notified of every gradient."""
        again = [index for batch in self._batching for index in self._count(batch)]
        self.notify_of_each()
        return again

    def note_last(self, index: int) -> None:
        """Expect this parameter's gradient to be the last one of its bucket the next time too."""
        batch = self._batch_of[index]
        if batch is not None:
            batch.expected_last = index

    def notify_of_each(self) -> None:
        """Notify the listener of every gradient from now on, and discard the batched ones."""
        for batch in self._batching:
            batch.notify_of_each()
        self._batching.clear()

    def with_hooks_of_others(self) -> list[int]:
        """The parameters with hooks of users, not counting those on their nodes."""
        return torch_internals.with_hooks_of_others(self._all_hooks)

    def notify_after_others(self, index: int) -> None:
        """A parameter's hook is running: notify the listener when all other hooks on it and on its node have run."""
        self._accumulators.run_last(index, self._notify_after_others)

    def remove(self) -> None:
        self.notify_of_each()
        for handle in self._handles:
            handle.remove()
        self._accumulators.remove_hooks()

    def _count(self, batch: "_Batch") -> list[int]:
        """Count the gradients that have come; returns those that were no longer missing."""
        # Counting one by one in Python would cost as much as the hooks that batching saves.
        return batch.bucket.arrive_all(list(map(self._index_of.__getitem__, map(id, batch.take()))))


class _Batch:
    """The hooks of one bucket's parameters, and the gradients that have come without a notification.

    ``slots`` has for each parameter the dict of its hooks, the key of ours, and the hook that notifies.
    """

    def __init__(self, bucket: Bucket, slots: Sequence[_Slot]) -> None:
        self.bucket = bucket
        self.last: int | None = None  #: the parameter that notifies; None if none does
        self.expected_last = bucket.param_indices[-1]
        self._iteration: BucketIteration | None = None  # the iteration in which it batches
        self._slots = slots
        self._arrived: list[Tensor] = []
        self._append = self._arrived.append

    def begin(self, arriving: Sequence[int], notify_of_last: bool) -> None:
        iteration = self.bucket.iteration
        if self._iteration is iteration and (notify_of_last or self.last is None):
            return
        if notify_of_last and (self.expected_last not in iteration.pending or self.expected_last in arriving):
            return  # the order has changed
        self._iteration = iteration
        self.last = self.expected_last if notify_of_last else None
        append = self._append
        for hooks, number, _ in self._slots:
            hooks[number] = append
        if notify_of_last:
            hooks, number, notify = self._slots[self.bucket.param_indices.index(self.expected_last)]
            hooks[number] = notify

    def notify_of_each(self) -> None:
        if self._iteration is None:
            return
        self.take()
        self._iteration = None
        for hooks, number, notify in self._slots:
            hooks[number] = notify

    def take(self) -> list[Tensor]:
        """The parameters that have come since the last call."""
        arrived = self._arrived[:]
        del self._arrived[: len(arrived)]  # the thread of another device may be appending
        return arrived


def _hook_for(listener: weakref.ref[ArrivalListener], index: int) -> Callable[[Tensor], None]:
    def hook(_parameter: Tensor) -> None:
        alive = listener()
        if alive is not None:
            alive.mark_parameter_ready(index)

    return hook
