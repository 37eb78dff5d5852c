"""The costs of a step, from measured steps.

Note [What is measured, and what is not]
A transfer's time begins with the last rank's launch, or with the end of the transfer before it, so a rank that was slow
while measuring makes no transfer look slow (Note [Late ranks]). Times of the computation are medians over ranks and
steps, so one slow rank, or one slow step, does not move them.

A report knows when a whole bucket was ready. Its gradients are taken to have come evenly by bytes since the bucket
before it. With a sharded optimizer, a report also knows when the forward began to wait for a bucket's parameters. The
forward is taken to read them in the opposite order of their gradients, evenly by bytes until it waits for the next
bucket. Without gathers, the forward is taken to mirror the backward. A report contains the optimizer's time only if the
optimizer is sharded and has several buckets: from the launch of one bucket's gather to the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from statistics import median

from ddp_compile.errors import number_of
from ddp_compile.plan.costs import Collective, Costs, fit_collective
from ddp_compile.plan.spec import BucketSpec
from ddp_compile.report.steps import Kind, MeasuredSteps, RankStep, union_length, waits_of


def costs_of(report: MeasuredSteps, all_reduce: Collective) -> Costs:
    """The costs of measured steps, if each bucket took this all-reduce.

    Raises:
        ValueError: No step has gradients of every bucket.
    """
    buckets = report.buckets
    ranks = [rank for step in report.steps for rank in step.ranks if rank.backward_began is not None]
    ready_of = {bucket.index: _times(_ready_s(rank, bucket.index) for rank in ranks) for bucket in buckets}
    if not ranks or not all(ready_of.values()):
        raise ValueError(
            f"the profile has {number_of(len(report.steps), 'step')}, and none in which every bucket is reduced;"
            " measure some whole steps, on 2 ranks or more"
        )
    ready_of_parameter: dict[int, float] = {}
    before_s = 0.0
    for bucket in sorted(buckets, key=lambda bucket: median(ready_of[bucket.index])):
        ready_s = max(before_s, median(ready_of[bucket.index]))
        ready_of_parameter |= _spread(bucket, before_s, ready_s)
        before_s = ready_s
    forward_s = max(0.0, median(_forward_s(rank) for rank in ranks))
    needed_of_parameter = _measured_needs(buckets, ranks, forward_s) or {
        index: forward_s * (1 - ready_s / before_s) if before_s else 0.0
        for index, ready_s in ready_of_parameter.items()
    }
    launches = [t.launch_returned - t.launched for rank in ranks for t in rank.transfers]
    steps_s = [time for rank in ranks for time in _step_s_per_byte(rank)]
    return Costs(
        reduce=all_reduce,
        ready_s=[ready_s for _, ready_s in sorted(ready_of_parameter.items())],
        needed_s=[needed_s for _, needed_s in sorted(needed_of_parameter.items())],
        forward_s=forward_s,
        launch_s=max(0.0, median(launches)),
        step_s_per_byte=max(0.0, median(steps_s)) * len(report.steps[0].ranks) if steps_s else 0.0,
    )


def collective_of(report: MeasuredSteps, kind: Kind = "reduce") -> Collective:
    """The alpha-beta model of a report's transfers: a line through the median time of each size.

    Args:
        report: Of steps with buckets of several sizes.
        kind: Which transfers.

    Raises:
        ValueError: The transfers determine no line.
    """
    times: dict[int, list[float]] = {}
    for step in report.steps:
        for index in {each.bucket for each in step.transfers if each.kind == kind}:
            if (time_s := step.transfer_s(index, kind)) is not None:
                times.setdefault(report.buckets[index].num_bytes, []).append(time_s)
    if len(times) < 2:
        raise ValueError(
            f"the profile has {kind} transfers of {number_of(len(times), 'size')} whose end is known, and a latency and"
            " a rate need at least 2; measure with a smaller bucket_cap_mb"
        )
    return fit_collective({size: median(each) for size, each in times.items()}, "measure more steps")


def all_reduce_of(report: MeasuredSteps) -> Collective:
    """The alpha-beta model of an all-reduce; of both transfers together if the optimizer is sharded.

    Raises:
        ValueError: As `collective_of`.
    """
    reduce = collective_of(report)
    if not any(each.kind == "gather" for step in report.steps for each in step.transfers):
        return reduce
    gather = collective_of(report, "gather")
    return Collective(latency_s=reduce.latency_s + gather.latency_s, s_per_byte=reduce.s_per_byte + gather.s_per_byte)


def _forward_s(rank: RankStep) -> float:
    """Its forward, without waits for gathers."""
    assert rank.backward_began is not None
    waits_s = union_length(
        (max(begin, rank.began), min(end, rank.backward_began))
        for begin, end in waits_of(transfer for transfer in rank.transfers if transfer.kind == "gather")
    )
    return rank.backward_began - rank.began - waits_s


def _measured_needs(
    buckets: Sequence[BucketSpec], ranks: Sequence[RankStep], forward_s: float
) -> dict[int, float] | None:
    """When the forward reads each parameter, since it began; None if it did not wait for all buckets."""
    read_of = {bucket.index: _times(_read_s(rank, bucket.index) for rank in ranks) for bucket in buckets}
    if not all(read_of.values()):
        return None
    needed_of_parameter: dict[int, float] = {}
    after_s = forward_s
    for bucket in sorted(buckets, key=lambda bucket: median(read_of[bucket.index]), reverse=True):
        read_s = min(after_s, median(read_of[bucket.index]))
        passed = _spread(bucket, 0.0, after_s - read_s)
        needed_of_parameter |= {index: max(read_s, after_s - passed_s) for index, passed_s in passed.items()}
        after_s = read_s
    return needed_of_parameter


def _read_s(rank: RankStep, bucket: int) -> float | None:
    """When the forward first waited for a bucket's parameters, since it began, without the waits before that."""
    gathers = [transfer for transfer in rank.transfers if transfer.kind == "gather"]
    waits_from = [t.waited_from for t in gathers if t.bucket == bucket and t.waited_from is not None]
    if not waits_from:
        return None
    read = waits_from[0]
    waits_s = union_length((max(begin, rank.began), min(end, read)) for begin, end in waits_of(gathers))
    return max(0.0, read - rank.began - waits_s)


def _ready_s(rank: RankStep, bucket: int) -> float | None:
    """When the gradients of a bucket were there, since the rank's first gradient."""
    assert rank.backward_began is not None
    ready = [transfer.ready for transfer in rank.transfers if (transfer.bucket, transfer.kind) == (bucket, "reduce")]
    return max(0.0, ready[-1] - rank.backward_began) if ready else None


def _step_s_per_byte(rank: RankStep) -> Iterable[float]:
    """How long this rank steps its part for each byte of a bucket, except for the bucket that is stepped first."""
    gathers = [transfer for transfer in rank.transfers if transfer.kind == "gather" and transfer.num_bytes]
    for before, after in itertools.pairwise(gathers):
        yield (after.launched - before.launch_returned) / after.num_bytes


def _times(times: Iterable[float | None]) -> list[float]:
    return [time for time in times if time is not None]


def _spread(bucket: BucketSpec, begin_s: float, end_s: float) -> dict[int, float]:
    """Times for the gradients of a bucket, by parameter index, evenly by bytes."""
    total, so_far, times = sum(gradient.num_bytes for gradient in bucket.gradients), 0, {}
    for gradient in bucket.gradients:
        so_far += gradient.num_bytes
        # Rounding must not move it past the end, which would make needed_s negative.
        times[gradient.index] = min(end_s, begin_s + (end_s - begin_s) * (so_far / total if total else 1.0))
    return times
