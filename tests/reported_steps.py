"""Steps as `model.measure()` reports them, made by hand."""

from __future__ import annotations

from typing import Any

from ddp_compile.report.steps import BucketInfo, RankStep, Step, StepReport, Transfer


def reduce(
    bucket: int, launched: float, done: float | None, waited_from: float, until: float, **other: Any
) -> Transfer:
    """A reduction whose launch takes no time."""
    fields = {"kind": "reduce", "num_bytes": 400, "ready": launched, "launch_returned": launched, **other}
    return Transfer(bucket=bucket, launched=launched, done=done, waited_from=waited_from, waited_until=until, **fields)


def rank_step(
    rank: int, *transfers: Transfer, began: float = 0.0, ended: float = 0.1, drained_s: float = 0.0
) -> RankStep:
    return RankStep(rank=rank, began=began, backward_began=0.03, ended=ended, transfers=transfers, drained_s=drained_s)


def step_with_late_rank(number: int = 7) -> Step:
    """Rank 3 launches bucket 1 20 ms later than rank 2; the transfers take 30 ms and 10 ms."""
    return Step(
        number=number,
        ranks=(
            rank_step(2, reduce(0, 0.04, 0.07, 0.06, 0.07), reduce(1, 0.05, 0.09, 0.07, 0.09), ended=0.091),
            rank_step(3, reduce(0, 0.04, 0.07, 0.07, 0.07), reduce(1, 0.07, 0.09, 0.07, 0.09), ended=0.092),
        ),
    )


def report_of(*steps: Step) -> StepReport:
    buckets = tuple(
        BucketInfo(index=i, names=(f"layers.{i}.weight",), num_bytes=400, dtype="float32") for i in range(2)
    )
    return StepReport(
        model="Mlp",
        algorithm="gradient all-reduce",
        plan_digest="0123456789abcdef",
        buckets=buckets,
        steps=list(steps),
        clock_error_s=25e-6,
        device="cpu",
    )
