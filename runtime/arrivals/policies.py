"""Which gradients an iteration waits for: all, those that come, or those that came in the first one."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import Any

from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.runtime.arrivals.used_parameters import UsedParameters
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.reducer_settings import ReducerSettings
from ddp_compile.runtime.comm import error_messages


class AllRequired:
    """Every gradient has to come exactly once in each iteration. The other policies change what they have to."""

    #: These parameters' gradients stay as they are, since no rank has used them; when all ranks have been heard.
    used_by_nobody: Set[int] = frozenset()
    #: Whether it has to be told of every gradient, one by one.
    counts_each = False
    #: Whether the ranks have to hear, at this iteration's end, what was used here; the same on every rank.
    has_message = False

    def note(self, index: int) -> None:
        """A gradient has come, inside ``no_sync`` or not."""

    def search(self, outputs: Any, on_reached: weakref.ReferenceType[Callable[[], None]]) -> None:
        """After a synchronised forward, find what no backward from its outputs can reach.

        Args:
            outputs: What it returned.
            on_reached: Called in each pass of a backward in which the outputs are differentiated, if the end of that
                pass may be the end of the iteration.
        """

    def leaves_out(self, bucket: Bucket) -> bool:
        """When an iteration begins: whether its bucket is not sent at all; the same on every rank."""
        return False

    def absent_from_the_start(self, arriving: Sequence[int]) -> Set[int]:
        """At each gradient of a backward: what need not be waited for; empty but for the first.

        Args:
            arriving: The parameters whose gradients are there.
        """
        return frozenset()

    def counts(self, bucket: Bucket, index: int, is_undefined: bool) -> bool:
        """Whether a gradient that has come is one that its bucket waits for.

        Args:
            bucket: Its bucket.
            index: Its parameter.
            is_undefined: Whether the parameter has arrived without it, and is unused so far.

        Raises:
            GradientArrivalError: Its bucket has been launched without it.
        """
        return True

    def is_last_pass(self) -> bool:
        """While a pass inside of a backward ends: whether nothing more will come in the passes around it."""
        return False

    def absent_at_the_end(self, missing: Set[int]) -> Set[int] | None:
        """At the end of a backward: which of the missing will not come; None if another backward may bring them."""
        return None

    def refuse_shadow(self) -> None:
        """This rank has no input left: raise a ReplicationError if it cannot go on without having had any."""

    def message(self) -> bytearray:
        """What the ranks have to hear: a flag for each parameter, 1 where it was used."""
        return bytearray()

    def message_of_shadow(self) -> bytearray:
        """`message` of a rank that contributes zeros: what was used here has still to be sent."""
        return bytearray()

    def hear(self, used: Sequence[int]) -> None:
        """Take note of the flags of all ranks: 1 where any rank has used the parameter."""

    def begin_iteration(self) -> None:
        """Forget what belongs to the iteration that has ended."""


class UnusedAllowed(AllRequired):
    """``find_unused_parameters``: what a backward does not bring is done without.

    Parameters to which no output of a forward leads are known before the backward, so that their buckets are launched
    early. They are marked at its first gradient, and not before, as the outputs may never be used. Others may turn out
    to be missing at its end only: compiled code knows better than the autograd graph around it.

    Args:
        parameters: In registration order; they are spoken of by their number.
        names: Their fully qualified names.
        rank: This rank, for messages.
        leaves_out_unused: Whether a bucket that no rank uses in the first iteration is never sent again.
    """

    counts_each = True
    has_message = True

    def __init__(
        self, parameters: Sequence[Parameter], names: Sequence[str], rank: int, leaves_out_unused: bool
    ) -> None:
        self._names = names
        self._rank = rank
        self._leaves_out_unused = leaves_out_unused
        self._unused_at_first: Set[int] | None = None  # by all ranks; None until the first iteration has ended
        self._used = UsedParameters(parameters)
        self._unreached: set[int] | None = None  # from all outputs since the last iteration

    def note(self, index: int) -> None:
        self._used.note(index)

    def search(self, outputs: Any, on_reached: weakref.ReferenceType[Callable[[], None]]) -> None:
        unreached = self._used.unreached_from(outputs)
        self._unreached = unreached if self._unreached is None else self._unreached & unreached

    def leaves_out(self, bucket: Bucket) -> bool:
        if not self._leaves_out_unused or not self._unused_at_first:
            return False
        return self._unused_at_first >= set(bucket.param_indices)

    def absent_from_the_start(self, arriving: Sequence[int]) -> Set[int]:
        absent, self._unreached = self._unreached or set(), set()
        return absent.difference(arriving)

    def counts(self, bucket: Bucket, index: int, is_undefined: bool) -> bool:
        if bucket.iteration.is_left_out:
            return False  # all ranks will hear of it
        unused = bucket.iteration.unused
        if index not in unused:
            if is_undefined:
                unused.add(index)
            return True
        if not is_undefined:
            if not bucket.is_pending:
                raise error_messages.arrived_unused(self._names[index], static_graph=False)
            unused.discard(index)  # its bucket will find it when the last one has come
        return False

    def absent_at_the_end(self, missing: Set[int]) -> Set[int] | None:
        return missing

    def message(self) -> bytearray:
        return self._used.take()

    def message_of_shadow(self) -> bytearray:
        return bytearray(len(self._names))

    def hear(self, used: Sequence[int]) -> None:
        self.used_by_nobody = frozenset(index for index, flag in enumerate(used) if not flag)
        if self._unused_at_first is None:
            self._unused_at_first = self.used_by_nobody

    def begin_iteration(self) -> None:
        self._unreached = None


class StaticGraph(UnusedAllowed):
    """``static_graph``: the first iteration teaches which gradients come and how often; all others are the same.

    The first iteration launches nothing before its end, since a gradient may come again until then: once for each of
    several reentrant checkpoints over one weight. From the second iteration on a bucket is launched as soon as all have
    come as often.
    """

    def __init__(
        self, parameters: Sequence[Parameter], names: Sequence[str], rank: int, leaves_out_unused: bool
    ) -> None:
        super().__init__(parameters, names, rank, leaves_out_unused)
        self._num_parameters = len(parameters)
        self._num_arrivals: Counter[int] = Counter()
        self._still_to_come: Counter[int] = Counter()
        self._pass_of_outputs: int | None = None  # in which the first iteration's outputs are differentiated

    @property
    def _is_learning(self) -> bool:
        """While the first iteration lasts; only in that one the ranks have something to hear."""
        return self.has_message

    def search(self, outputs: Any, on_reached: weakref.ReferenceType[Callable[[], None]]) -> None:
        """Find out in which pass of a backward the outputs are differentiated; the first iteration ends when that does.

        It is not always the outermost one: a reentrant checkpoint around the whole module opens one inside it. Nor need
        it bring a gradient itself, where all parameters are used inside reentrant checkpoints. What leads to the
        gradients makes no difference, they are counted.

        Source: the place of ``_DDPSink`` of torch 2.13, nn/parallel/distributed.py, whose backward queues the end.
        """

        def note_pass(_gradient: Any) -> None:
            self._pass_of_outputs = torch_internals.current_graph_task_id()
            if self._is_learning and (reached := on_reached()) is not None:
                reached()

        if self._is_learning:
            for tensor in torch_internals.tensors_in(outputs):
                if tensor.grad_fn is not None:
                    torch_internals.register_own(tensor.register_hook, note_pass)

    def is_last_pass(self) -> bool:
        return self._is_learning and self._pass_of_outputs == torch_internals.current_graph_task_id()

    def counts(self, bucket: Bucket, index: int, is_undefined: bool) -> bool:
        if self._is_learning:
            self._num_arrivals[index] += 1
        elif not self._num_arrivals[index] or (index in self.used_by_nobody and not is_undefined):
            raise error_messages.arrived_unused(self._names[index], static_graph=True)
        if is_undefined:
            bucket.iteration.unused.add(index)
        else:
            bucket.iteration.unused.discard(index)
        if self._is_learning:
            return False
        self._still_to_come[index] -= 1
        return self._still_to_come[index] <= 0

    def absent_at_the_end(self, missing: Set[int]) -> Set[int] | None:
        return self._never_coming() if self._is_learning else None

    def refuse_shadow(self) -> None:
        if self._is_learning:
            raise error_messages.static_graph_without_input()

    def hear(self, used: Sequence[int]) -> None:
        super().hear(used)
        self.has_message = False

    def begin_iteration(self) -> None:
        super().begin_iteration()
        self._still_to_come = self._num_arrivals.copy()
        if not self._is_learning:
            self._unreached = self._never_coming()

    def _never_coming(self) -> set[int]:
        return set(range(self._num_parameters)) - self._num_arrivals.keys()


def policy_for(
    settings: ReducerSettings, parameters: Sequence[Parameter], names: Sequence[str], rank: int
) -> AllRequired:
    """The policy that the settings ask for; the other arguments are those of `UnusedAllowed`."""
    if settings.static_graph:
        return StaticGraph(parameters, names, rank, settings.skip_all_reduce_unused_params)
    if settings.find_unused_parameters:
        return UnusedAllowed(parameters, names, rank, settings.skip_all_reduce_unused_params)
    return AllRequired()
