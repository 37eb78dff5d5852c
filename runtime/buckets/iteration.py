"""One iteration: the reduction of all buckets of a module, from the first gradient to the last ``.grad``.

`BucketSet.begin_iteration` replaces both objects when an iteration ends. Nothing else does, and nothing resets them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ddp_compile.runtime.buckets.bucket import Bucket
    from ddp_compile.runtime.buckets.comm_algorithm import Pending
    from ddp_compile.runtime.buckets.computed_bucket import ComputedBucket
    from ddp_compile.runtime.comm.streams import Event


@dataclass(slots=True, eq=False)
class Iteration:
    """The iteration of one module that is under way or, between two backwards, comes next."""

    #: The same on every rank; the first one is number 1. An iteration in which the ranks exchanged nothing, of a
    #: regulariser over a few parameters for example, leaves its number to the next one.
    number: int

    # Launches; `LaunchQueue` writes these.
    num_launched: int = 0  #: buckets that were launched or passed over, the first ones in plan order
    has_launched: bool = False  #: whether any was launched
    is_whole: bool = True  #: False after a bucket was passed over until the next iteration
    is_exchange: bool = False  #: whether the ranks exchange something although no bucket was launched
    is_shadow: bool = False  #: whether this rank contributes zeros because it has no input left (``Join``)

    # Arrivals, by parameter number; `Reducer` and arrivals/ write these.
    passes: set[int] = field(default_factory=set)  #: graph tasks of the backward that call the reducer when they end
    with_running_hooks: list[Bucket] = field(default_factory=list)  #: complete, but hooks may still change a gradient
    arrived: set[int] = field(default_factory=set)  #: had a gradient when the reducer was last told of them
    defined: set[int] = field(default_factory=set)  #: by a prehook of AccumulateGrad: got a gradient the last time
    undefined: set[int] = field(default_factory=set)  #: got none, by a prehook or because ``.grad`` never was there
    unreached: set[int] | None = None  #: no path leads to them from any output; None before a search
    arrivals: Counter[int] = field(default_factory=Counter)  #: with a static graph: how often each has arrived
    pass_of_outputs: int | None = None  #: with a static graph: graph task that differentiates the outputs
    has_new_hooks: bool = False  #: whether users have registered hooks since the last iteration

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


@dataclass(slots=True, eq=False)
class BucketIteration:
    """What one bucket has come to in an iteration. Only `Bucket` writes it."""

    pending: set[int]  #: parameters whose gradient is missing
    state: BucketState = BucketState.PENDING
    unused: set[int] = field(default_factory=set)  #: parameters that get no gradient on this rank
    is_skipped: bool = False  #: whether the others of the iteration are sent without it
    work: Pending | None = None
    #: The gradients as a compiled backward has computed them, if it has computed the whole bucket.
    computed: ComputedBucket | None = None
    #: This rank's gradients, if ``.grad`` no longer holds them and they may have to be sent again.
    own: list[Tensor] | None = None
    is_claimed: bool = False  #: whether the flat buffer may be written
    saved: dict[int, Tensor] = field(default_factory=dict)  #: by position: unused gradients from the flat buffer
    #: The flattened gradients, until `.grad` is something else: a tensor that loses its Python object while torch holds
    #: it gets it back, and both are slow to free.
    flattened: Sequence[Tensor] = ()
    flattened_at: Event | None = None  #: recorded after the flatten, if another bucket had to go first
    copied_back: frozenset[int] = frozenset()  #: positions whose ``.grad`` stays the tensor that it is
