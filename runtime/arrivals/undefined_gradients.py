"""Undefined gradients: the engine reaches a parameter and has nothing to add to its ``.grad``."""

import weakref
from collections.abc import Callable
from typing import Any

from ddp_compile.errors import GradientArrivalError, this_rank
from ddp_compile.runtime.arrivals.accumulators import Accumulators
from ddp_compile.runtime.buckets.bucket_set import BucketSet


class UndefinedGradients:
    """Tells an undefined gradient from one that a hook has taken away.

    A custom Function that returns None leads to an undefined gradient. So does compiled code that reads a parameter
    without giving it a gradient: under ``torch.no_grad()``, through ``detach()``, for an argmax. AccumulateGrad runs
    all the same, and so do the hooks after it: the parameter has arrived, and contributes zeros if it has no ``.grad``.
    But ``.grad`` is also None if a hook has removed it, for example one that steps an optimizer. Then zeros would be
    wrong.

    Only a prehook of AccumulateGrad can tell these apart for certain. It costs a Python call, so only two kinds of
    parameters get one: those with hooks of others, and those whose gradient has been undefined before. For the others,
    a missing gradient was removed if it was there on arrival, and is undefined otherwise.

    Source: ``Reducer::mark_variable_ready_dense`` of torch 2.13, csrc/distributed/c10d/reducer.cpp, which contributes
    zeros in both cases.
    """

    def __init__(self, bucket_set: BucketSet, accumulators: Accumulators) -> None:
        self._set = bucket_set
        self._accumulators = accumulators

    def watch(self, index: int) -> None:
        """Put a prehook on a parameter's node, so that from its next run on it is certain whether its gradient is
        undefined."""
        self._accumulators.add_prehook(index, _prehook_for(weakref.ref(self._set), index))

    def arrive(self, index: int) -> bool:
        """A parameter's hook has run: whether its gradient is undefined. Raises if a hook has taken it away."""
        if self._set.parameters[index].grad is not None:
            self._set.iteration.arrived.add(index)
            return False
        self._set.iteration.arrived.discard(index)  # of an earlier backward
        self.verify(index)
        return True

    def verify(self, index: int) -> None:
        """A parameter has arrived without a gradient: raise a GradientArrivalError unless it is undefined."""
        iteration = self._set.iteration
        if index not in iteration.undefined:
            if index in iteration.arrived or index in iteration.defined:
                raise GradientArrivalError(
                    f"{this_rank()}: the gradient of {self._set.names[index]} was set to None before it was averaged,"
                    " perhaps by a hook that steps an optimizer inside the backward; step after the backward"
                )
            iteration.undefined.add(index)
            self.watch(index)


def _prehook_for(bucket_set: weakref.ref[BucketSet], index: int) -> Callable[[tuple[Any, ...]], None]:
    def prehook(gradients: tuple[Any, ...]) -> None:
        if (alive := bucket_set()) is not None:
            seen = alive.iteration
            is_not, is_now = (seen.defined, seen.undefined) if gradients[0] is None else (seen.undefined, seen.defined)
            is_not.discard(index)
            is_now.add(index)

    return prehook
