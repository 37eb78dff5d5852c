"""When each bucket of a plan is ready, launched and reduced, by the costs of a step.

Note [The model of a step]
A step is one period of the training loop, from the beginning of a backward to that of the next one.

1. The backward computes. The k-th launch delays everything after it by ``launch_s``, so the k-th bucket is launched at
   ``ready_s + k launch_s``.
2. Transfers run in launch order, one at a time: each begins when it is launched and the link is free. The backward
   returns when the last one is done.
3. The optimizer steps. A sharded one steps the buckets in reverse launch order, which is about the order in which the
   forward reads parameters, and launches the gather of each after its step, which takes ``launch_s`` again.
4. The forward computes. With gathers, each of which begins when it is launched and the link is free, it stops before a
   parameter whose gather is not done.

Computation and communication do not slow each other down, and all ranks are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddp_compile.plan.costs import Collective, Costs
from ddp_compile.plan.spec import BucketPlan


class Load(NamedTuple):
    """What a step asks of a bucket."""

    num_bytes: int  #: of its flat buffer
    ready_s: float  #: when its last gradient is ready, since the backward began, if nothing were launched
    needed_s: float = 0.0  #: when the forward reads its first parameter, since the forward began


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTimes:
    """When things happen to one bucket, in seconds since the backward began.

    Args:
        ready_s: All its gradients are there.
        launched_s: Its transfer has been launched.
        done_s: It is reduced.
        exposed_s: What the end of the backward waits for it, after it has waited for the buckets before.
        gathered_s: Its parameters are complete; None without a sharded optimizer.
        gather_exposed_s: What the forward waits for them.
    """

    ready_s: float
    launched_s: float
    done_s: float
    exposed_s: float
    gathered_s: float | None = None
    gather_exposed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A predicted step.

    Args:
        buckets: In launch order.
        reduced_s: When the backward returns, in seconds since it began.
        step_s: Length of the step.
        launches_s: Part of it that launches take.
    """

    buckets: tuple[BucketTimes, ...]
    reduced_s: float
    step_s: float
    launches_s: float

    @property
    def exposed_s(self) -> float:
        """What the computation waits for communication."""
        return sum(bucket.exposed_s + bucket.gather_exposed_s for bucket in self.buckets)


def loads_of(plan: BucketPlan, costs: Costs) -> list[Load]:
    """The load of each bucket of a plan.

    Raises:
        ValueError: The costs are those of a model with another number of parameters.
    """
    if len(plan.bucket_of_parameter) != len(costs.ready_s):
        raise ValueError(
            f"the plan has {len(plan.bucket_of_parameter)} parameters, and the costs are for {len(costs.ready_s)};"
            " pass the costs of the same model"
        )
    needed_s = costs.needed_s or [0.0] * len(costs.ready_s)
    return [
        Load(
            bucket.num_bytes,
            max(costs.ready_s[gradient.index] for gradient in bucket.gradients),
            min(needed_s[gradient.index] for gradient in bucket.gradients),
        )
        for bucket in plan.buckets
    ]


def predict(loads: Sequence[Load], costs: Costs) -> Schedule:
    """The schedule of buckets in launch order, see Note [The model of a step]."""
    times, ready_s, free_s = [], 0.0, 0.0
    computed_s = max((load.ready_s for load in loads), default=0.0) + len(loads) * costs.launch_s
    waited_s = computed_s
    for number, load in enumerate(loads, start=1):
        ready_s = max(ready_s, load.ready_s)
        launched_s = ready_s + number * costs.launch_s
        free_s = max(free_s, launched_s) + costs.reduce.time_s(load.num_bytes)
        exposed_s = max(0.0, free_s - waited_s)
        waited_s += exposed_s
        times.append((launched_s - costs.launch_s, launched_s, free_s, exposed_s))
    step_s = costs.step_s_per_byte * sum(load.num_bytes for load in loads)
    if costs.gather is None:
        buckets = tuple(BucketTimes(ready_s=r, launched_s=s, done_s=d, exposed_s=e) for r, s, d, e in times)
        launches_s = len(loads) * costs.launch_s
        return Schedule(
            buckets=buckets, reduced_s=waited_s, step_s=waited_s + step_s + costs.forward_s, launches_s=launches_s
        )
    launches_s = 2 * len(loads) * costs.launch_s
    begins_s = waited_s + step_s + len(loads) * costs.launch_s
    gathered_s = _gathered(loads, costs, costs.gather, waited_s)
    exposed = _gathers_exposed(loads, [done_s - begins_s for done_s in gathered_s])
    return Schedule(
        buckets=tuple(
            BucketTimes(ready_s=r, launched_s=s, done_s=d, exposed_s=e, gathered_s=done_s, gather_exposed_s=waits_s)
            for (r, s, d, e), done_s, waits_s in zip(times, gathered_s, exposed, strict=True)
        ),
        reduced_s=waited_s,
        step_s=begins_s + costs.forward_s + sum(exposed),
        launches_s=launches_s,
    )


def _gathered(loads: Sequence[Load], costs: Costs, gather: Collective, begins_s: float) -> list[float]:
    """When each gather is done, if the optimizer begins to step at ``begins_s``."""
    stepped_s, free_s, done = begins_s, begins_s, []
    for load in reversed(loads):
        stepped_s += costs.step_s_per_byte * load.num_bytes + costs.launch_s
        free_s = max(free_s, stepped_s) + gather.time_s(load.num_bytes)
        done.append(free_s)
    return done[::-1]


def _gathers_exposed(loads: Sequence[Load], done_s: Sequence[float]) -> list[float]:
    """What the forward waits for each bucket whose gather is done so many seconds after the forward began."""
    exposed, late_s = [0.0] * len(loads), 0.0
    for i in sorted(range(len(loads)), key=lambda i: (loads[i].needed_s, -i)):
        exposed[i] = max(0.0, done_s[i] - loads[i].needed_s - late_s)
        late_s += exposed[i]
    return exposed
