"""One iteration: the reduction of all buckets of a module, from the first gradient to the last ``.grad``.

`BucketSet.begin_iteration` replaces both objects when an iteration ends. Nothing else does, and nothing resets them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ddp_compile.runtime.buckets.bucket import Bucket
    from ddp_compile.runtime.buckets.comm_algorithm import Pending
    from ddp_compile.runtime.buckets.computed_bucket import ComputedBucket
    from ddp_compile.runtime.comm.streams import Event


class Iteration:
    """The iteration of one module that is under way or, between two backwards, comes next.

    Args:
        number: The same on every rank; the first one is number 1. If the ranks exchanged nothing in an iteration, of a
            regularizer over a few parameters for example, the next one has the same number.
    """

    __slots__ = (
        "arrivals",
        "arrived",
        "defined",
        "has_launched",
        "has_new_hooks",
        "is_exchange",
        "is_shadow",
        "is_whole",
        "num_launched",
        "number",
        "pass_of_outputs",
        "passes",
        "undefined",
        "unreached",
        "with_running_hooks",
    )

    def __init__(self, number: int) -> None:
        self.number = number

        # Launches; `LaunchQueue` writes these.
        self.num_launched = 0  #: how many buckets, from the first in plan order, were launched or passed over
        self.has_launched = False  #: whether any was launched
        self.is_whole = True  #: False after a bucket was passed over until the next iteration
        self.is_exchange = False  #: whether the ranks exchange something although no bucket was launched
        self.is_shadow = False  #: whether this rank contributes zeros because it has no input left (``Join``)

        # Arrivals, by parameter number; `Reducer` and arrivals/ write these.
        self.passes: set[int] = set()  #: graph tasks of the backward that will call the reducer when they end
        self.with_running_hooks: list[Bucket] = []  #: complete, but hooks may still change the last gradient
        self.arrived: set[int] = set()  #: held a gradient when the reducer last looked
        self.defined: set[int] = set()  #: got a gradient the last time, according to a prehook of AccumulateGrad
        self.undefined: set[int] = set()  #: got none, according to a prehook or because there never was a ``.grad``
        self.unreached: set[int] | None = None  #: no path leads to them from any output; None before a search
        self.arrivals: Counter[int] = Counter()  #: with a static graph: how often each has arrived
        self.pass_of_outputs: int | None = None  #: with a static graph: graph task that differentiates the outputs
        self.has_new_hooks = False  #: whether users have registered hooks since the last iteration

    @property
    def met_others(self) -> bool:
        """Whether the ranks have exchanged gradients or parameters."""
        return self.has_launched or self.is_exchange


class BucketState(Enum):
    """The state of a bucket in an iteration."""

    PENDING = auto()  #: gradients are missing
    READY = auto()  #: nothing is missing; it waits for the buckets before it
    LAUNCHED = auto()  #: its reduction is under way
    REDUCED = auto()  #: its reduction has been waited for


class BucketIteration:
    """The progress of one bucket in an iteration. Only `Bucket` writes it.

    Args:
        param_indices: The bucket's parameters.
    """

    __slots__ = (
        "computed",
        "copied_back",
        "flattened",
        "flattened_at",
        "is_claimed",
        "is_skipped",
        "non_finite",
        "own",
        "pending",
        "saved",
        "state",
        "unused",
        "work",
    )

    def __init__(self, param_indices: Iterable[int]) -> None:
        self.state = BucketState.PENDING
        self.pending = set(param_indices)  #: parameters whose gradient is missing
        self.unused: set[int] = set()  #: parameters that get no gradient on this rank
        self.is_skipped = False  #: whether the iteration sends the other buckets without it
        self.work: Pending | None = None
        #: The gradients that a compiled backward computed, if it computed the whole bucket.
        self.computed: ComputedBucket | None = None
        #: This rank's gradients, if ``.grad`` no longer holds them and they may have to be sent again.
        self.own: list[Tensor] | None = None
        #: Which gradients were infinite or NaN before the reduction, in the bucket's order: bool, on their device. None
        #: if they were not checked or are all known to be finite.
        self.non_finite: Tensor | None = None
        self.is_claimed = False  #: whether the flat buffer may be written
        self.saved: dict[int, Tensor] = {}  #: by position: copies of unused gradients that are in the flat buffer
        # The flattened gradients, until `.grad` is something else. A tensor that loses its Python object while torch
        # holds it gets a new one later, which makes freeing slow.
        self.flattened: Sequence[Tensor] = ()
        self.flattened_at: Event | None = None  #: recorded after the flatten, if another bucket had to go first
        self.copied_back: frozenset[int] = frozenset()  #: positions whose ``.grad`` stays the same tensor
