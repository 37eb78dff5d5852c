"""Gradients that are undefined: the engine comes to a parameter and has nothing to add to its ``.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Parameter

from ddp_compile.runtime.arrivals.accumulators import Accumulators
from ddp_compile.runtime.comm import error_messages


@dataclass(slots=True)
class _Seen:
    """What one iteration has shown; parameters by their number."""

    undefined: set[int] = field(default_factory=set)
    defined: set[int] = field(default_factory=set)  # by what our prehooks have seen when the node ran last
    came: set[int] = field(default_factory=set)  # those that held a gradient when the reducer was told of them last


class UndefinedGradients:
    """Tells a gradient that is undefined from one that somebody has taken away.

    A custom Function that returns None leads to an undefined gradient, and so does compiled code that reads a parameter
    where no gradient comes of it: under ``torch.no_grad()``, through ``detach()``, for an argmax. AccumulateGrad runs
    all the same, and so do the hooks behind it: the parameter has arrived, and contributes zeros if ``.grad`` holds
    nothing. But ``.grad`` is None as well where a hook, one that steps an optimizer for example, has taken it away, and
    zeros would be wrong.

    Only a prehook of AccumulateGrad can tell these apart for certain. It costs a Python function, so it is set where
    somebody else has hooks on a parameter, and where a gradient has been undefined once. Otherwise a gradient that was
    there on arrival has been taken away, and one that was not is undefined.

    Args:
        parameters: The parameters, spoken of by their number.
        accumulators: Theirs.
        names: Their fully qualified names.
        rank: This rank, for messages.

    Source: ``Reducer::mark_variable_ready_dense`` of torch 2.13, csrc/distributed/c10d/reducer.cpp, which contributes
    zeros in both cases.
    """

    def __init__(
        self, parameters: Sequence[Parameter], accumulators: Accumulators, names: Sequence[str], rank: int
    ) -> None:
        self._parameters = parameters
        self._accumulators = accumulators
        self._names = names
        self._rank = rank
        self._seen = _Seen()

    def watch_all(self, indices: Iterable[int]) -> None:
        """`watch` for several parameters: those on which somebody else has hooks."""
        for index in indices:
            self.watch(index)

    def watch(self, index: int) -> None:
        """From the next time that a parameter's node runs on, know for certain whether its gradient is undefined."""
        if not self._accumulators.has_prehook(index):
            self._accumulators.add_prehook(index, _note_for(weakref.ref(self), index))

    def arrive(self, index: int) -> bool:
        """A parameter's hook has run.

        Returns:
            Whether it has no gradient because that is undefined.

        Raises:
            GradientArrivalError: It has none because somebody has taken it away.
        """
        if self._parameters[index].grad is not None:
            self._seen.came.add(index)
            return False
        self._seen.came.discard(index)  # of an earlier backward
        self.verify(index)
        return True

    def verify(self, index: int) -> None:
        """A parameter that has arrived has no gradient: find out why.

        Raises:
            GradientArrivalError: Somebody has taken it away.
        """
        if index not in self._seen.undefined:
            if index in self._seen.came or index in self._seen.defined:
                raise error_messages.gradient_gone(self._names[index])
            self._seen.undefined.add(index)
            self.watch(index)

    @property
    def indices(self) -> Set[int]:
        """The parameters whose gradient is undefined in this iteration."""
        return self._seen.undefined

    def begin_iteration(self) -> None:
        """Forget the iteration that has ended."""
        self._seen = _Seen()


def _note_for(owner: weakref.ref[UndefinedGradients], index: int) -> Callable[[tuple[Any, ...]], None]:
    def prehook(gradients: tuple[Any, ...]) -> None:
        if (alive := owner()) is not None:
            seen = alive._seen
            is_not, is_now = (seen.defined, seen.undefined) if gradients[0] is None else (seen.undefined, seen.defined)
            is_not.discard(index)
            is_now.add(index)

    return prehook
