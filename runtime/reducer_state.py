"""The states of a reducer, and what it needs to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from ddp_compile.bucket_plan import BucketPlan
from ddp_compile.runtime.progress import Progress


class ReducerState(Enum):
    """What the reducer makes of the next gradient.

    ========== ================================================= ==========
    from       on                                                to
    ========== ================================================= ==========
    ARMED      a forward inside no_sync, no other one before it  LOCAL
    LOCAL      a forward outside of no_sync                      ARMED
    ARMED      the first gradient of a backward                  REDUCING
    REDUCING   the end of a backward, all buckets have left      ARMED
    REDUCING   the end of a backward, some gradients missing     INCOMPLETE
    INCOMPLETE the first gradient of another backward            REDUCING
    INCOMPLETE a forward: MissingGradientError                   ARMED
    REDUCING   a forward: the backward had raised                FAILED
    ========== ================================================= ==========
    """

    ARMED = auto()  #: it starts a round
    LOCAL = auto()  #: it stays on this rank
    REDUCING = auto()  #: it belongs to the round that has started
    INCOMPLETE = auto()  #: a backward has ended before all gradients had arrived; another one may bring them
    FAILED = auto()  #: a backward has raised in the middle of a round: this rank may be out of step with the others


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducerSettings:
    """What a reducer needs to know beside its parameters.

    Args:
        gradient_as_bucket_view: See `BucketBuffer`.
        find_unused_parameters: Let buckets leave without the gradients that a backward does not bring.
        static_graph: Learn from the first round which gradients come, and how often; every later round is the same.
        takes_whole_buckets: Let buckets leave inside compiled backwards that offer them; the same on every rank.
        progress: What ranks tell each other while they train.
        on_plan_sealed: Called once, on every rank, with the plan all ranks agreed on.
    """

    gradient_as_bucket_view: bool
    find_unused_parameters: bool
    static_graph: bool
    takes_whole_buckets: bool
    progress: Progress
    on_plan_sealed: Callable[[BucketPlan], None]
