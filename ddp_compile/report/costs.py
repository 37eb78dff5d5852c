"""The costs of a step, from measured steps.

Note [What is measured, and what is not]
Times are medians over ranks and steps, and transfers leave out waits for late ranks (Note [Late ranks]), so a slow rank
or step does not move them. Within a bucket, gradients are taken to have come evenly by bytes since the bucket before
it, and the forward to read parameters in the opposite order, evenly by bytes until it waits for the next bucket;
without gathers, it is taken to mirror the backward. The optimizer's time is known only if it is sharded and has several
buckets: from the launch of one bucket's gather to the next.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from ddp_compile.errors import number_of
from ddp_compile.plan.costs import Collective, Costs, fit_collective
from ddp_compile.plan.spec import BucketSpec
from ddp_compile.report.steps import Kind, MeasuredSteps, RankStep, Transfer, union_length, waits_of


def costs_of(report: MeasuredSteps, all_reduce: Collective) -> Costs:
    """The costs of measured steps, if each bucket took this all-reduce.

    Raises a ValueError if no step has gradients of every bucket.
    """
    buckets = report.buckets
    ranks = [rank for step in report.steps for rank in step.ranks if rank.backward_began is not None]
    ready_of = _medians(_ready_s, buckets, ranks)
    if not ranks or ready_of is None:
        raise ValueError(
            f"the profile has {number_of(len(report.steps), 'step')}, and none in which every bucket is reduced;"
            " measure some whole steps, on 2 ranks or more"
        )
    ready_of_parameter: dict[int, float] = {}
    before_s = 0.0
    for bucket in sorted(buckets, key=lambda bucket: ready_of[bucket.index]):
        ready_s = max(before_s, ready_of[bucket.index])
        ready_of_parameter |= _spread(bucket, before_s, ready_s)
        before_s = ready_s
    forward_s = median(_computed_s(rank, rank.backward_began) for rank in ranks)
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

    Raises a ValueError if the transfers determine no line.
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
    return fit_collective({size: median(each) for size, each in times.items()})


def all_reduce_of(report: MeasuredSteps) -> Collective:
    """The alpha-beta model of an all-reduce; of both transfers together if the optimizer is sharded."""
    reduce = collective_of(report)
    if not any(each.kind == "gather" for step in report.steps for each in step.transfers):
        return reduce
    gather = collective_of(report, "gather")
    return Collective(latency_s=reduce.latency_s + gather.latency_s, s_per_byte=reduce.s_per_byte + gather.s_per_byte)


def _gathers_of(rank: RankStep) -> list[Transfer]:
    return [transfer for transfer in rank.transfers if transfer.kind == "gather"]


def _computed_s(rank: RankStep, until: float | None) -> float:
    """How long its forward had computed by then, without the waits for gathers."""
    assert until is not None
    waits_s = union_length((max(begin, rank.began), min(end, until)) for begin, end in waits_of(_gathers_of(rank)))
    return max(0.0, until - rank.began - waits_s)


def _measured_needs(
    buckets: Sequence[BucketSpec], ranks: Sequence[RankStep], forward_s: float
) -> dict[int, float] | None:
    """When the forward reads each parameter, since it began; None if it did not wait for all buckets."""
    read_of = _medians(_read_s, buckets, ranks)
    if read_of is None:
        return None
    needed_of_parameter: dict[int, float] = {}
    after_s = forward_s
    for bucket in sorted(buckets, key=lambda bucket: read_of[bucket.index], reverse=True):
        read_s = min(after_s, read_of[bucket.index])
        passed = _spread(bucket, 0.0, after_s - read_s)
        needed_of_parameter |= {index: max(read_s, after_s - passed_s) for index, passed_s in passed.items()}
        after_s = read_s
    return needed_of_parameter


def _read_s(rank: RankStep, bucket: int) -> float | None:
    """When the forward first waited for a bucket's parameters, since it began, without the waits before that."""
    read = [t.waited_from for t in _gathers_of(rank) if t.bucket == bucket and t.waited_from is not None]
    return _computed_s(rank, read[0]) if read else None


def _ready_s(rank: RankStep, bucket: int) -> float | None:
    """When the gradients of a bucket were there, since the rank's first gradient."""
    assert rank.backward_began is not None
    ready = [transfer.ready for transfer in rank.transfers if (transfer.bucket, transfer.kind) == (bucket, "reduce")]
    return max(0.0, ready[-1] - rank.backward_began) if ready else None


def _step_s_per_byte(rank: RankStep) -> Iterable[float]:
    """How long this rank steps its part for each byte of a bucket, except for the bucket that is stepped first."""
    gathers = [transfer for transfer in _gathers_of(rank) if transfer.num_bytes]
    for before, after in itertools.pairwise(gathers):
        yield (after.launched - before.launch_returned) / after.num_bytes


def _medians(
    time_of: Callable[[RankStep, int], float | None], buckets: Sequence[BucketSpec], ranks: Sequence[RankStep]
) -> dict[int, float] | None:
    """A time of each bucket, over all ranks that have it; None if no rank has that of some bucket."""
    times = {b.index: [time for rank in ranks if (time := time_of(rank, b.index)) is not None] for b in buckets}
    return {index: median(each) for index, each in times.items()} if all(times.values()) else None


def _spread(bucket: BucketSpec, begin_s: float, end_s: float) -> dict[int, float]:
    """Times for the gradients of a bucket, by parameter index, evenly by bytes."""
    total, so_far, times = sum(gradient.num_bytes for gradient in bucket.gradients), 0, {}
    for gradient in bucket.gradients:
        so_far += gradient.num_bytes
        # Rounding must not move it past the end, which would make needed_s negative.
        times[gradient.index] = min(end_s, begin_s + (end_s - begin_s) * (so_far / total if total else 1.0))
    return times
