"""What ``model.measure()`` returns: when each bucket was ready, launched, transferred and waited for, on every rank.

All times are in seconds since the first rank of the report began the step, on one clock; `StepReport.clock_error_s`
says how far the ranks' clocks may be apart.

Note [What a step is]
A step begins with its first forward and ends when its backward has reduced all gradients. The gathers of a sharded
optimizer that are launched after it travel while the next forward computes, so they belong to the next step, the one
that waits for them. They may have been launched before it began; such times are negative.

Note [Late ranks]
A collective moves nothing before its last rank has launched it. So the time from one rank's launch to the end is not
the transfer's: it contains the wait for the last rank. `Step.transfer_s` begins with the last launch, or with the end
of the transfer before it if they share a link; `Step.lateness_s` is what remains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["reduce", "gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketInfo:
    """A bucket of the plan, as far as reports show it.

    Args:
        index: Its position in the plan.
        names: Fully qualified names of its parameters, in the order of the flat buffer.
        num_bytes: Bytes of its flat buffer.
        dtype: Name of the dtype, for example ``"float32"``.
    """

    index: int
    names: tuple[str, ...]
    num_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One transfer of one bucket as one rank saw it.

    Args:
        bucket: Index of the bucket in the plan.
        kind: ``"reduce"`` for gradients, ``"gather"`` for the parameters of a sharded optimizer.
        num_bytes: Bytes of the flat buffer; what travels depends on the algorithm.
        ready: When all gradients were in the flat buffer, or the optimizer had stepped all of the bucket.
        launched: When the transfer was handed to the process group.
        launch_returned: When the algorithm's launch returned. Long after ``launched`` if it waits inside.
        done: When the result was complete on this rank; None if the algorithm does not say.
        waited_from: When this rank began to wait for it; None if nothing waited.
        waited_until: When this rank went on.
    """

    bucket: int
    kind: Kind
    num_bytes: int
    ready: float
    launched: float
    launch_returned: float
    done: float | None
    waited_from: float | None
    waited_until: float | None

    @property
    def exposed_s(self) -> float:
        """What this rank waited for it."""
        if self.waited_from is None or self.waited_until is None:
            return 0.0
        return self.waited_until - self.waited_from


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step of one rank.

    Args:
        rank: Global rank.
        began: When its first forward began.
        backward_began: When the first gradient of the iteration arrived; None if that is not known.
        ended: When all gradients had been handed over.
        transfers: In the order of their launches.
        drained_s: Waited for the algorithm as a whole, not for one of the transfers.
    """

    rank: int
    began: float
    backward_began: float | None
    ended: float
    transfers: tuple[Transfer, ...]
    drained_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """What this rank waited for communication: for each transfer, and for the algorithm as a whole."""
        return sum(transfer.exposed_s for transfer in self.transfers) + self.drained_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of all ranks.

    Args:
        number: Number of the iteration, the same on every rank; the first one is 1.
        ranks: In the order of the process group.
    """

    number: int
    ranks: tuple[RankStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Some steps of all ranks, the same on every rank.

    Args:
        model: The model's class.
        algorithm: Name of the algorithm.
        plan_digest: Digest of the bucket plan.
        buckets: Of the plan, in its order.
        steps: In their order.
        clock_error_s: The most by which two ranks' clocks may be apart.
        device: Type of the device, for example ``"cuda"``.
    """

    model: str
    algorithm: str
    plan_digest: str
    buckets: tuple[BucketInfo, ...]
    steps: Sequence[Step]
    clock_error_s: float
    device: str
