"""What the losses of a step are multiplied by, so that gradients become a mean.

Without ``--tokens`` each rank's loss is a mean, and gradients are the mean over ranks. With it losses are summed over
tokens, and gradients are the mean over the tokens of all micro-batches and ranks.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

#: The target of a position that has no token; ``cross_entropy`` ignores it.
PADDING = -100


def num_tokens(targets: Tensor) -> Tensor:
    """How many targets are no padding, shape (), on their device."""
    return (targets != PADDING).sum()


class LossScale:
    """Losses are means, and stay as they are."""

    def begin_step(self, targets: Sequence[Tensor]) -> None:
        """Called before the first forward of a step, with the targets of its micro-batches."""

    def scaled(self, loss: Tensor, targets: Tensor) -> Tensor:
        """What the backward of a micro-batch begins with; called once for each."""
        return loss


class OwnCount(LossScale):
    """Summed losses are divided by the tokens of this rank, which trains alone."""

    def begin_step(self, targets: Sequence[Tensor]) -> None:
        self._factor = 1 / self._own(targets)

    def scaled(self, loss: Tensor, targets: Tensor) -> Tensor:
        return loss * self._factor

    def _own(self, targets: Sequence[Tensor]) -> Tensor:
        return torch.stack([num_tokens(each) for each in targets]).sum()


class BlockingCount(OwnCount):
    """What is written around DistributedDataParallel: an all-reduce counts all tokens before the first forward."""

    def begin_step(self, targets: Sequence[Tensor]) -> None:
        count = self._own(targets)
        dist.all_reduce(count)
        # The gradients' mean over the ranks divides by their number.
        self._factor = dist.get_world_size() / count


class CountedByModel(LossScale):
    """The replicated model counts the tokens of all ranks, by its method ``normalize_by``."""

    def __init__(self, normalize_by: Callable[[Tensor], None]) -> None:
        self._normalize_by = normalize_by

    def scaled(self, loss: Tensor, targets: Tensor) -> Tensor:
        self._normalize_by(num_tokens(targets))
        return loss
