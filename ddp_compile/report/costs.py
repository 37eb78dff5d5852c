"""The costs of a step, from measured steps.

Note [What is measured, and what is not]
A transfer's time begins with the last rank's launch and with the end of the transfer before it, so a rank that was slow
while measuring makes no transfer look slow (Note [Late ranks] of `ddp_compile.report.steps`). Times of the computation
are medians over ranks and steps, so one slow rank, or a slow step, does not move them.

A report knows when a whole bucket was ready. Its gradients are taken to have come evenly by bytes since the bucket
before it. With a sharded optimizer it also knows when the forward began to wait for a bucket's parameters. It is taken
to read them in the opposite order of their gradients, evenly by bytes until it waits for the next bucket. Without
gathers, the forward is taken to mirror the backward. The optimizer's time is in a report only if it is sharded and has
several buckets: from the launch of one bucket's gather to the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from statistics import median

from ddp_compile.errors import shorten_names
from ddp_compile.plan.costs import Collective, Computation, fit_collective
from ddp_compile.plan.spec import PADDED_ALIGNMENT_BYTES
from ddp_compile.report.over_ranks import covered, waits_of
from ddp_compile.report.steps import BucketInfo, Kind, RankStep, StepReport


def computation_of(report: StepReport, names: Sequence[str], sizes: Sequence[int]) -> Computation:
    """The computation of the steps of a report.

    Args:
        report: Of the same model.
        names: Fully qualified names of the model's parameters, by index.
        sizes: Bytes of their gradients.

    Raises:
        ValueError: The report is of another model, or it has no step with gradients.
    """
    measured = {name for bucket in report.buckets for name in bucket.names}
    if measured != set(names):
        only_there, only_here = sorted(measured - set(names)), sorted(set(names) - measured)
        raise ValueError(
            f"the profile is of {report.model} with {len(measured)} parameters, and this model has {len(names)};"
            f" only in the profile: {', '.join(only_there[:3]) or 'none'};"
            f" only in the model: {', '.join(only_here[:3]) or 'none'}. Measure this model"
        )
    ranks = [rank for step in report.steps for rank in step.ranks if rank.backward_began is not None]
    ready_of = {bucket.index: _times(_ready_s(rank, bucket.index) for rank in ranks) for bucket in report.buckets}
    if not ranks or not all(ready_of.values()):
        raise ValueError(
            f"the profile has {len(report.steps)} steps, and not every bucket is reduced in one;"
            " measure some whole steps"
        )
    size_of = dict(zip(names, sizes, strict=True))
    _refuse_other_sizes(report, size_of)
    ready_of_name: dict[str, float] = {}
    before_s = 0.0
    for bucket in sorted(report.buckets, key=lambda bucket: median(ready_of[bucket.index])):
        ready_s = max(before_s, median(ready_of[bucket.index]))
        ready_of_name |= _spread(bucket, size_of, before_s, ready_s)
        before_s = ready_s
    forward_s = max(0.0, median(_forward_s(rank) for rank in ranks))
    needed_of_name = _measured_needs(report.buckets, ranks, size_of, forward_s) or {
        name: forward_s * (1 - ready_s / before_s) if before_s else 0.0 for name, ready_s in ready_of_name.items()
    }
    launches = [t.launch_returned - t.launched for rank in ranks for t in rank.transfers]
    steps_s = [time for rank in ranks for time in _step_s_per_byte(rank)]
    return Computation(
        ready_s=[ready_of_name[name] for name in names],
        needed_s=[needed_of_name[name] for name in names],
        forward_s=forward_s,
        launch_s=max(0.0, median(launches)),
        step_s_per_byte=max(0.0, median(steps_s)) * len(report.steps[0].ranks) if steps_s else 0.0,
    )


def collective_of(report: StepReport, world_size: int, kind: Kind = "reduce") -> Collective:
    """The alpha-beta model of a report's transfers: a line through the median time of each bucket.

    Args:
        report: Of steps with buckets of several sizes.
        world_size: The number of ranks that the transfers shall be of.
        kind: Which transfers.

    Raises:
        ValueError: The report is of another number of ranks, or its transfers determine no line.
    """
    if wrong := sorted({len(step.ranks) for step in report.steps} - {world_size}):
        raise ValueError(
            f"the profile is of {wrong[0]} ranks, and the plan is for {world_size}; pass --bandwidth and --latency,"
            f" or a profile of {world_size} ranks"
        )
    times: dict[int, list[float]] = {}
    for step in report.steps:
        for index in {t.bucket for rank in step.ranks for t in rank.transfers if t.kind == kind}:
            if (time_s := step.transfer_s(index, kind)) is not None:
                times.setdefault(report.buckets[index].num_bytes, []).append(time_s)
    if len(times) < 2:
        raise ValueError(
            f"the profile has {kind} transfers of {len(times)} sizes, and a latency and a rate need at least 2; measure"
            " with a smaller bucket_cap_mb"
        )
    return fit_collective({size: median(each) for size, each in times.items()}, "measure more steps")


def all_reduce_of(report: StepReport, world_size: int) -> Collective:
    """The alpha-beta model of an all-reduce; of both transfers together if the optimizer is sharded.

    Args:
        report: See `collective_of`.
        world_size: See `collective_of`.

    Raises:
        ValueError: As `collective_of`.
    """
    reduce = collective_of(report, world_size)
    if not any(t.kind == "gather" for step in report.steps for rank in step.ranks for t in rank.transfers):
        return reduce
    gather = collective_of(report, world_size, "gather")
    return Collective(latency_s=reduce.latency_s + gather.latency_s, s_per_byte=reduce.s_per_byte + gather.s_per_byte)


def _refuse_other_sizes(report: StepReport, size_of: dict[str, int]) -> None:
    """Raise a ValueError if a bucket cannot hold just its gradients, so that their shapes or dtypes are others."""
    for bucket in report.buckets:
        least = sum(size_of[name] for name in bucket.names)
        # Gaps between gradients; a sharded optimizer fills up the last rank's part of the bucket too.
        most = least + (len(bucket.names) + len(report.steps[0].ranks)) * PADDED_ALIGNMENT_BYTES
        if not least <= bucket.num_bytes <= most:
            raise ValueError(
                f"the profile's bucket {bucket.index} has {bucket.num_bytes} bytes, and this model's gradients of"
                f" {shorten_names(bucket.names)} have {least}: shapes or dtypes differ. Measure this model"
            )


def _forward_s(rank: RankStep) -> float:
    """Its forward, without what it has waited for gathers."""
    assert rank.backward_began is not None
    waits = covered(
        (max(begin, rank.began), min(end, rank.backward_began))
        for begin, end in waits_of(transfer for transfer in rank.transfers if transfer.kind == "gather")
    )
    return rank.backward_began - rank.began - waits


def _measured_needs(
    buckets: Sequence[BucketInfo], ranks: Sequence[RankStep], size_of: dict[str, int], forward_s: float
) -> dict[str, float] | None:
    """When the forward reads each parameter, since it began; None if it did not wait for all buckets."""
    read_of = {bucket.index: _times(_read_s(rank, bucket.index) for rank in ranks) for bucket in buckets}
    if not all(read_of.values()):
        return None
    needed_of_name: dict[str, float] = {}
    after_s = forward_s
    for bucket in sorted(buckets, key=lambda bucket: median(read_of[bucket.index]), reverse=True):
        read_s = min(after_s, median(read_of[bucket.index]))
        passed_of_name = _spread(bucket, size_of, 0.0, after_s - read_s)
        needed_of_name |= {name: max(read_s, after_s - passed_s) for name, passed_s in passed_of_name.items()}
        after_s = read_s
    return needed_of_name


def _read_s(rank: RankStep, bucket: int) -> float | None:
    """When the forward first waited for a bucket's parameters, since it began, without the waits before that."""
    gathers = [transfer for transfer in rank.transfers if transfer.kind == "gather"]
    waits_from = [t.waited_from for t in gathers if t.bucket == bucket and t.waited_from is not None]
    if not waits_from:
        return None
    read = waits_from[0]
    waits_s = covered((max(begin, rank.began), min(end, read)) for begin, end in waits_of(gathers))
    return max(0.0, read - rank.began - waits_s)


def _ready_s(rank: RankStep, bucket: int) -> float | None:
    """When the gradients of a bucket were there, since the rank's first gradient."""
    assert rank.backward_began is not None
    ready = [transfer.ready for transfer in rank.transfers if (transfer.bucket, transfer.kind) == (bucket, "reduce")]
    return max(0.0, ready[-1] - rank.backward_began) if ready else None


def _step_s_per_byte(rank: RankStep) -> Iterable[float]:
    """Seconds in which this rank steps its part, for each byte of a bucket; not of the bucket that is stepped first."""
    gathers = [transfer for transfer in rank.transfers if transfer.kind == "gather" and transfer.num_bytes]
    for before, after in itertools.pairwise(gathers):
        yield (after.launched - before.launch_returned) / after.num_bytes


def _times(times: Iterable[float | None]) -> list[float]:
    return [time for time in times if time is not None]


def _spread(bucket: BucketInfo, size_of: dict[str, int], begin_s: float, end_s: float) -> dict[str, float]:
    """Times for the gradients of a bucket, evenly by bytes."""
    total, so_far, times = sum(size_of[name] for name in bucket.names), 0, {}
    for name in bucket.names:
        so_far += size_of[name]
        # Not after the end by rounding, which would make needed_s negative.
        times[name] = min(end_s, begin_s + (end_s - begin_s) * (so_far / total if total else 1.0))
    return times
