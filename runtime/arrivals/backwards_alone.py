"""Backwards that come before any call of the module."""

from __future__ import annotations

import logging

from ddp_compile.runtime.comm import error_messages

log = logging.getLogger(__name__)


class BackwardsAlone:
    """Decides which backwards before the first call of the module are reduced.

    If the user calls ``module.forward`` or another method, the backward brings all gradients, and they are reduced. The
    gradients of a regularizer stay where they are, and are reduced in the first iteration.

    Args:
        num_parameters: Of the module.
    """

    def __init__(self, num_parameters: int) -> None:
        self._num_parameters = num_parameters
        self._arrived: set[int] = set()
        self._num_partial = 0

    def arrive(self, index: int) -> None:
        """A parameter has got a gradient."""
        self._arrived.add(index)

    def forget(self) -> None:
        """The module is called: earlier gradients stay where they are."""
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
