"""Passes of backwards: those of one iteration, and those that come before any call of the module."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ddp_compile import torch_internals
from ddp_compile.runtime.comm import error_messages

log = logging.getLogger(__name__)


class BackwardPasses:
    """The passes that have brought something in one iteration; another iteration has another object.

    A backward is one pass, and one more for each reentrant checkpoint.
    """

    def __init__(self) -> None:
        self._with_callback: set[int] = set()

    def call_back_at_the_end(self, callback: Callable[[], None]) -> bool:
        """Have something called when the innermost pass that is under way ends, once for each pass.

        Returns:
            Whether it is the first time in this pass.
        """
        task = torch_internals.current_graph_task_id()
        if task in self._with_callback:
            return False
        # The callback belongs to the innermost pass, so each pass that brings gradients queues one.
        self._with_callback.add(task)
        torch_internals.queue_backward_callback(callback)
        return True


class BackwardsAlone:
    """Backwards that come before any call of the module.

    Either somebody calls ``module.forward`` or a method of their own: all gradients are there, and are reduced. Or it
    was a regulariser: its gradients stay where they are, and are reduced together with those of the first iteration.

    Args:
        num_parameters: Of the module.
        rank: This rank, for the log.
    """

    def __init__(self, num_parameters: int, rank: int) -> None:
        self._num_parameters = num_parameters
        self._rank = rank
        self._arrived: set[int] = set()
        self._num_partial = 0

    def note(self, index: int) -> None:
        """A gradient has come."""
        self._arrived.add(index)

    def forget(self) -> None:
        """The module is called: what has come before stays where it is."""
        self._arrived = set()

    def backward_ends(self) -> bool:
        """Whether it has brought all gradients."""
        arrived, self._arrived = self._arrived, set()
        if len(arrived) == self._num_parameters:
            return True
        self._num_partial += 1
        if self._num_partial == error_messages.MOST_BACKWARDS_ALONE:
            log.warning(error_messages.backwards_alone(len(arrived), self._num_parameters))
        return False
