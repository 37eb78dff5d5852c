"""Gradients that may stay away: found anew in each round, or learnt in the first one.

The reducer asks what it need not wait for. Without any of this, every gradient has to come exactly once in each round.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.runtime import refusals
from ddp_compile.runtime.used_parameters import UsedParameters, tensors_in


class OptionalGradients:
    """``find_unused_parameters``: what a backward does not bring is done without.

    Parameters to which no output of a forward leads are known before the backward, so that their buckets leave early.
    They are marked at its first gradient, and not before, as the outputs may never be used. Others may turn out to be
    missing at its end only: compiled code knows better than the autograd graph around it.

    Args:
        parameters: In registration order; they are spoken of by their number.
        names: Their fully qualified names.
        rank: This rank, for messages.
    """

    def __init__(self, parameters: Sequence[Parameter], names: Sequence[str], rank: int) -> None:
        self.unused: set[int] = set()  #: in this round on this rank
        #: These parameters' gradients stay as they are; when all ranks have been heard.
        self.used_by_nobody: frozenset[int] = frozenset()
        self._names = names
        self._rank = rank
        self._used = UsedParameters(parameters)
        self._unreached: set[int] | None = None  # from all outputs since the last round

    def note(self, index: int) -> None:
        """A gradient has come, inside ``no_sync`` or not."""
        self._used.note(index)

    def search(self, outputs: Any, on_reached: weakref.ReferenceType[Callable[[], None]]) -> None:
        """After a synchronised forward, find what no backward from its outputs can reach.

        Args:
            outputs: What it returned.
            on_reached: Called in each pass of a backward in which the outputs are differentiated, if the end of that
                pass may be the end of the round.
        """
        unreached = self._used.unreached_from(outputs)
        self._unreached = unreached if self._unreached is None else self._unreached & unreached

    def absent_from_the_start(self, arriving: Sequence[int]) -> set[int]:
        """At each gradient of a backward: what need not be waited for; empty but for the first.

        Args:
            arriving: The parameters whose gradients are there.
        """
        absent, self._unreached = self._unreached or set(), set()
        return absent.difference(arriving)

    def settles(self, index: int, has_left: bool, is_undefined: bool) -> bool:
        """Whether a gradient that has come is not to be counted now.

        Args:
            index: Its parameter.
            has_left: Whether its bucket has left.
            is_undefined: Whether the parameter has arrived without it, and is unused so far.

        Raises:
            GradientArrivalError: Its bucket has left without it.
        """
        if index not in self.unused:
            if is_undefined:
                self.unused.add(index)
            return False
        if not is_undefined:
            if has_left:
                raise refusals.arrived_unused(self._rank, self._names[index], static_graph=False)
            self.unused.discard(index)  # its bucket will find it when the last one has come
        return True

    def is_last_pass(self) -> bool:
        """While a pass inside of a backward ends: whether nothing more will come in the passes around it."""
        return False

    def absent_at_the_end(self, missing: set[int]) -> set[int] | None:
        """At the end of a backward: which of the missing will not come; None if another backward may bring them."""
        return missing

    @property
    def speaks(self) -> bool:
        """Whether the other ranks have to hear at the end of this round what was used here; the same on every rank."""
        return True

    def message(self) -> bytearray:
        """What they have to hear: a flag for each parameter, 1 where it was used."""
        return self._used.take()

    def hear(self, used: Sequence[int]) -> None:
        """Take note of the flags of all ranks: 1 where any rank has used the parameter."""
        self.used_by_nobody = frozenset(index for index, flag in enumerate(used) if not flag)

    def begin_round(self) -> None:
        """Forget what belongs to the round that has ended."""
        self.unused.clear()
        self._unreached = None


class StaticGraph(OptionalGradients):
    """``static_graph``: the first round teaches which gradients come and how often; all others are the same.

    The first round sends nothing before its end, since a gradient may come again until then: once for each of several
    reentrant checkpoints over one weight. From the second round on a bucket leaves as soon as all have come as often.
    """

    def __init__(self, parameters: Sequence[Parameter], names: Sequence[str], rank: int) -> None:
        super().__init__(parameters, names, rank)
        self._num_parameters = len(parameters)
        self._num_arrivals: Counter[int] = Counter()
        self._still_to_come: Counter[int] = Counter()
        self._is_learning = True  # while the first round lasts
        self._pass_of_outputs: int | None = None  # in which the first round's outputs are differentiated

    def search(self, outputs: Any, on_reached: weakref.ReferenceType[Callable[[], None]]) -> None:
        """Find out in which pass of a backward the outputs are differentiated; the first round ends when that does.

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
            for tensor in tensors_in(outputs):
                if tensor.grad_fn is not None:
                    torch_internals.register_own(tensor.register_hook, note_pass)

    def is_last_pass(self) -> bool:
        return self._is_learning and self._pass_of_outputs == torch_internals.current_graph_task_id()

    def settles(self, index: int, has_left: bool, is_undefined: bool) -> bool:
        if self._is_learning:
            self._num_arrivals[index] += 1
        elif not self._num_arrivals[index] or (index in self.used_by_nobody and not is_undefined):
            raise refusals.arrived_unused(self._rank, self._names[index], static_graph=True)
        if is_undefined:
            self.unused.add(index)
        else:
            self.unused.discard(index)
        if self._is_learning:
            return True
        self._still_to_come[index] -= 1
        return self._still_to_come[index] > 0

    def absent_at_the_end(self, missing: set[int]) -> set[int] | None:
        return self._never_coming() if self._is_learning else None

    @property
    def speaks(self) -> bool:
        return self._is_learning

    def hear(self, used: Sequence[int]) -> None:
        super().hear(used)
        self._is_learning = False

    def begin_round(self) -> None:
        super().begin_round()
        self._still_to_come = self._num_arrivals.copy()
        if not self._is_learning:
            self._unreached = self._never_coming()

    def _never_coming(self) -> set[int]:
        return set(range(self._num_parameters)) - self._num_arrivals.keys()
