"""A bucket as a compiled backward offers it; see `early_buckets`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor
from torch.nn import Parameter


class OfferRole(Enum):
    """What becomes of a bucket that a graph offers."""

    WAITS = auto()  #: it leaves when its parameters' hooks have run
    TEACHES = auto()  #: so it does, but is watched, to learn whether it may leave early in later rounds
    LEAVES = auto()  #: it leaves now
    LEAVES_IN_SIGHT = auto()  #: so it does, while hooks look at its gradients, see Note [Leaving in sight]


class BucketOffer:
    """The gradients of one bucket as a graph has offered them in this round.

    Args:
        parameters: The bucket's parameters. Unless somebody looks, their ``.grad`` is taken away until the round ends,
            or until the gradient arrives where the bucket has not left: AccumulateGrad stores a gradient as it is only
            where there is none.
        gradients: What the graph returns for them.
        role: What becomes of the bucket.
        compares_values: Whether hooks may write into the gradients where neither address nor version shows it.
    """

    def __init__(
        self, parameters: Sequence[Parameter], gradients: Sequence[Tensor], role: OfferRole, compares_values: bool
    ) -> None:
        self.left = role is not OfferRole.TEACHES
        self.arrived: set[int] = set()  # places in the bucket; while it is only watched
        self.has_more = False  # whether something else has come to it; while it is only watched
        self.is_compared = False
        # Other tensors on the same memory: the engine must be able to steal the gradients themselves.
        self.aliases = [gradient.detach() for gradient in gradients]
        self._versions: list[int] = []
        self.watch()
        self.awaited: set[int] = set()
        self.before = [parameter.grad for parameter in parameters]
        self.in_sight = role is OfferRole.LEAVES_IN_SIGHT
        self._values = [alias.clone() for alias in self.aliases] if compares_values else None
        if not self.in_sight:
            for parameter in parameters:
                parameter.grad = None

    def watch(self) -> None:
        """From now on nobody but the engine should touch the gradients."""
        self._versions = [alias._version for alias in self.aliases]

    def is_changed(self, place: int, gradient: Tensor | None) -> bool:
        """Whether what AccumulateGrad has stored is not, or not only, what was offered.

        A compiler may return another tensor object than it offers. Both are new then, and have the version 0.
        """
        return (
            gradient is None
            or gradient.data_ptr() != self.aliases[place].data_ptr()
            or gradient._version != self._versions[place]
            or (self._values is not None and not _have_equal_values(gradient, self._values[place]))
        )


def _have_equal_values(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
