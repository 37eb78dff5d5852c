"""Backwards that come before any call of the module."""

import logging
from collections.abc import Collection

from ddp_compile.errors import this_rank

log = logging.getLogger(__name__)

#: A few regularisers may have backwards of their own before the module is first called; more than these are a mistake.
_MOST_ALONE = 8


class BackwardsAlone:
    """Decides which backwards before the first call of the module are reduced.

    If the user calls ``module.forward`` or another method, a backward brings all gradients, and they are
    reduced. If it was a regulariser, its gradients stay where they are, and are reduced in the first iteration.
    """

    def __init__(self, num_parameters: int) -> None:
        self._num_parameters = num_parameters
        self._arrived: dict[int, None] = {}  # in the order of their last gradients
        self._num_partial = 0

    def arrive(self, index: int) -> None:
        self._arrived.pop(index, None)
        self._arrived[index] = None

    def forget(self) -> None:
        """The module is called: earlier gradients stay where they are."""
        self._arrived = {}

    def backward_ends(self) -> Collection[int]:
        """If it has brought all gradients, their parameters in the order in which they came last; otherwise none."""
        arrived, self._arrived = self._arrived, {}
        if len(arrived) == self._num_parameters:
            return arrived
        self._num_partial += 1
        if self._num_partial == _MOST_ALONE:
            log.warning(
                f"{this_rank()}: {_MOST_ALONE} backwards have brought gradients, the last one of {len(arrived)} of"
                f" {self._num_parameters} parameters, and the module itself has not been called yet: they are not"
                " averaged. Call the module, model(x), or apply ddp_compile to the submodule that is trained"
            )
        return ()
