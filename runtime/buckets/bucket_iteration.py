"""What one bucket has come to in one iteration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ddp_compile.runtime.buckets.comm_algorithm import Pending
    from ddp_compile.runtime.buckets.computed_bucket import ComputedBucket
    from ddp_compile.runtime.comm.streams import Event


class BucketState(Enum):
    """Where a bucket stands in one iteration."""

    PENDING = auto()  #: gradients are still missing
    READY = auto()  #: all gradients are in the flat buffer, an earlier bucket has not been launched yet
    LAUNCHED = auto()  #: its reduction is under way
    REDUCED = auto()  #: its reduction has been waited for


class BucketIteration:
    """What one bucket has come to in one iteration; it is replaced when that ends, and never reset.

    Args:
        param_indices: The bucket's parameters.
    """

    __slots__ = (
        "computed",
        "copied_back",
        "flattened",
        "flattened_at",
        "is_claimed",
        "is_left_out",
        "kept",
        "non_finite",
        "own",
        "pending",
        "state",
        "unused",
        "work",
    )

    def __init__(self, param_indices: Iterable[int]) -> None:
        self.state = BucketState.PENDING
        self.pending = set(param_indices)  #: whose gradients AccumulateGrad has not stored
        self.unused: set[int] = set()  #: what no gradient came for on this rank
        self.work: Pending | None = None
        #: As a compiled backward has computed it; None where none has.
        self.computed: ComputedBucket | None = None
        #: This rank's gradients where ``.grad`` has them no longer and they may have to be sent once more.
        self.own: list[Tensor] | None = None
        #: Which gradients of this rank were infinite or NaN when they were flattened, in the bucket's order: bool, on
        #: their device. None if they were not checked, or all are known to be finite.
        self.non_finite: Tensor | None = None
        self.is_claimed = False
        self.is_left_out = False  #: whether it is not sent, since no rank uses it
        self.kept: dict[int, Tensor] = {}  # by position: what an unused parameter held in the flat buffer
        # What was flattened, until `.grad` is something else: a tensor that loses its Python object while torch holds
        # it gets it back, and both are slow to free.
        self.flattened: Sequence[Tensor] = ()
        #: Recorded after the flatten, if the bucket could not be launched at once.
        self.flattened_at: Event | None = None
        self.copied_back: frozenset[int] = frozenset()  # positions whose ``.grad`` stays the tensor that it is
