"""Which gradients an iteration waits for: all, those that come, or those that came in the first iteration."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import Any

from ddp_compile import torch_internals
from ddp_compile.config import ReplicateConfig
from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.comm import error_messages


class AllRequired:
    """Every gradient has to come exactly once in each iteration. The other policies override what differs."""

    #: Parameters whose gradients stay as they are because no rank has used them; known after `update`.
    used_by_nobody: Set[int] = frozenset()
    #: Whether `counts` must be called with every gradient.
    counts_each = False
    #: Whether the ranks exchange in this iteration which parameters were used; the same on every rank.
    has_flags = False
    #: Whether compiled backwards may launch buckets in this iteration; the same on every rank.
    launches_early = True

    def note(self, index: int) -> None:
        """A gradient has come, inside ``no_sync`` or not."""

    def search(self, outputs: Any, on_reached: weakref.ReferenceType[Callable[[], None]]) -> None:
        """After a synchronized forward, find the parameters that no backward from its outputs can reach.

        ``on_reached`` is called in each pass of a backward that differentiates the outputs, if the iteration may end
        when that pass does.
        """

    def leaves_out(self, bucket: Bucket) -> bool:
        """When an iteration begins, whether it leaves a bucket out; the same on every rank."""
        return False

    def absent_from_the_start(self, arriving: Sequence[int]) -> Set[int]:
        """The parameters that need not be waited for, when the first gradients of a backward are ``arriving``."""
        return frozenset()

    def counts(self, bucket: Bucket, index: int, is_undefined: bool) -> bool:
        """A parameter has arrived: whether its bucket waits for that. Raises if it was launched without it."""
        return True

    def is_last_pass(self) -> bool:
        """When a reentrant pass ends, whether the passes around it will bring no more gradients."""
        return False

    def absent_at_the_end(self, missing: Set[int]) -> Set[int] | None:
        """At the end of a backward, the missing gradients that will not come; None if another backward may bring
        them."""
        return None

    def refuse_shadow(self) -> None:
        """Raise a ReplicationError if this rank, which has no input left, would have needed some earlier."""

    def flags(self, is_shadow: bool) -> bytearray:
        """What this rank tells the others: a 1 for each parameter that was used here; a shadow sets none yet."""
        return bytearray()

    def update(self, used: Sequence[int]) -> None:
        """Take the flags of all ranks: 1 if any rank has used the parameter."""


class UnusedAllowed(AllRequired):
    """``find_unused_parameters``: an iteration ends without the gradients that its backward does not bring.

    Before the backward, the autograd graph shows the parameters to which no output of a forward leads, so that their
    buckets are launched early. They are marked at the backward's first gradient and not earlier, since the outputs may
    never be used. At the end of the backward, more may turn out to be missing: a compiled graph may return None for a
    parameter to which the autograd graph leads, and an output may be an object in which no tensors can be found.

    If ``leaves_out_unused``, a bucket that no rank uses in the first iteration is never sent again.

    Source: ``search_unused_parameters`` and ``local_used_map_`` of torch 2.13, csrc/distributed/c10d/reducer.cpp.
    """

    counts_each = True
    has_flags = True

    def __init__(self, bucket_set: BucketSet, leaves_out_unused: bool) -> None:
        self._set = bucket_set
        self._leaves_out_unused = leaves_out_unused
        self._unused_at_first: Set[int] | None = None  # by all ranks; None in the first iteration
        self._index_of = {id(parameter): i for i, parameter in enumerate(bucket_set.parameters)}
        self._used_here: set[int] = set()  # got a gradient on this rank since the last message

    def note(self, index: int) -> None:
        self._used_here.add(index)

    def search(self, outputs: Any, on_reached: weakref.ReferenceType[Callable[[], None]]) -> None:
        leaves = torch_internals.leaves_of(torch_internals.tensors_in(outputs))
        reached = {self._index_of.get(id(leaf)) for leaf in leaves}
        unreached, iteration = {i for i in self._index_of.values() if i not in reached}, self._set.iteration
        if torch_internals.may_hide_tensors(outputs):
            unreached = set()  # the end of the backward tells
        iteration.unreached = unreached if iteration.unreached is None else iteration.unreached & unreached

    def leaves_out(self, bucket: Bucket) -> bool:
        if not self._leaves_out_unused or not self._unused_at_first:
            return False
        return self._unused_at_first >= set(bucket.param_indices)

    def absent_from_the_start(self, arriving: Sequence[int]) -> Set[int]:
        return (self._set.iteration.unreached or set()).difference(arriving)

    def counts(self, bucket: Bucket, index: int, is_undefined: bool) -> bool:
        if bucket.iteration.is_skipped:
            return False  # the message tells all ranks
        if index not in bucket.iteration.unused:
            if is_undefined:
                bucket.mark_unused(index)
            return True
        if not is_undefined:
            if not bucket.is_pending:
                raise error_messages.arrived_unused(self._set.names[index], static_graph=False)
            bucket.mark_used((index,))  # the bucket finds its gradient after the last one has arrived
        return False

    def absent_at_the_end(self, missing: Set[int]) -> Set[int] | None:
        return missing

    def flags(self, is_shadow: bool) -> bytearray:
        flags = bytearray(len(self._set.parameters))
        if not is_shadow:
            for index in self._used_here:
                flags[index] = 1
            self._used_here.clear()
        return flags

    def update(self, used: Sequence[int]) -> None:
        self.used_by_nobody = frozenset(index for index, flag in enumerate(used) if not flag)
        if self._unused_at_first is None:
            self._unused_at_first = self.used_by_nobody


class StaticGraph(UnusedAllowed):
    """``static_graph``: the first iteration shows which gradients come and how often; all later ones are the same.

    The first iteration launches nothing before its end, since a gradient may come again until then: once for each of
    several reentrant checkpoints over one weight. From the second iteration on, a bucket is launched as soon as each
    has come that often.
    """

    launches_early = False

    def __init__(self, bucket_set: BucketSet, leaves_out_unused: bool) -> None:
        super().__init__(bucket_set, leaves_out_unused)
        self._expected: Counter[int] | None = None  # how often each parameter arrives; None in the first iteration

    def search(self, outputs: Any, on_reached: weakref.ReferenceType[Callable[[], None]]) -> None:
        """Find the pass of a backward that differentiates the outputs; the first iteration ends when that pass does.

        It is not always the outermost one: a reentrant checkpoint around the whole module opens one inside it. It may
        bring no gradient itself, if all parameters are used inside reentrant checkpoints. Arrivals are counted, so it
        does not matter which pass brings a gradient.

        Source: the place of ``_DDPSink`` of torch 2.13, nn/parallel/distributed.py, whose backward queues the end.
        """

        def note_pass(_gradient: Any) -> None:
            self._set.iteration.pass_of_outputs = torch_internals.current_graph_task_id()
            if self._expected is None and (reached := on_reached()) is not None:
                reached()

        if self._expected is None:
            for tensor in torch_internals.tensors_in(outputs):
                if tensor.grad_fn is not None:
                    torch_internals.register_own(tensor.register_hook, note_pass)

    def is_last_pass(self) -> bool:
        task = torch_internals.current_graph_task_id()
        return self._expected is None and self._set.iteration.pass_of_outputs == task

    def absent_from_the_start(self, arriving: Sequence[int]) -> Set[int]:
        return frozenset() if self._expected is None else self._never_coming(self._expected).difference(arriving)

    def counts(self, bucket: Bucket, index: int, is_undefined: bool) -> bool:
        arrivals, expected = self._set.iteration.arrivals, self._expected
        if expected is not None and (not expected[index] or (index in self.used_by_nobody and not is_undefined)):
            raise error_messages.arrived_unused(self._set.names[index], static_graph=True)
        arrivals[index] += 1
        if is_undefined:
            bucket.mark_unused(index)
        else:
            bucket.mark_used((index,))
        return expected is not None and arrivals[index] >= expected[index]

    def absent_at_the_end(self, missing: Set[int]) -> Set[int] | None:
        arrivals = self._set.iteration.arrivals
        if self._expected is None:
            return self._never_coming(arrivals)
        # Several reentrant checkpoints over one weight bring one gradient if they are compiled as one graph.
        return frozenset() if all(arrivals[index] for index in missing) else None

    def refuse_shadow(self) -> None:
        if self._expected is None:
            raise ReplicationError(
                f"{this_rank()}: static_graph=True learns from the first iteration, in which this rank has had no"
                " input; give every rank at least one batch, or drop static_graph"
            )

    def update(self, used: Sequence[int]) -> None:
        super().update(used)
        self._expected = self._set.iteration.arrivals
        self.has_flags, self.launches_early = False, True

    def _never_coming(self, arrivals: Counter[int]) -> set[int]:
        return set(range(len(self._set.parameters))) - arrivals.keys()


def policy_for(config: ReplicateConfig, bucket_set: BucketSet) -> AllRequired:
    if config.static_graph:
        return StaticGraph(bucket_set, config.skip_all_reduce_unused_params)
    if config.find_unused_parameters:
        return UnusedAllowed(bucket_set, config.skip_all_reduce_unused_params)
    return AllRequired()
