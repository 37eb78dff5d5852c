"""Costs from measured steps: the line through transfers, times of gradients, and reports that do not fit."""

import random
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from simulated_steps import reduce

from ddp_compile.plan.costs import Collective, Costs
from ddp_compile.plan.spec import BucketPlan, BucketSpec, GradientSpec, renumbered
from ddp_compile.report.costs import all_reduce_of, collective_of, costs_of
from ddp_compile.report.step_report import StepReport
from ddp_compile.report.steps import RankStep, Step, Transfer

SIZES = {"c": 1000, "b": 3000, "a": 8000}  # in the order in which they are ready
BUCKETS = [(("c", "b"), 4000, 0.010), (("a",), 8000, 0.040)]
PLAN = BucketPlan(
    tuple(
        BucketSpec(
            i, tuple(GradientSpec("abc".index(n), n, SIZES[n] // 4, "float32", "cpu") for n in names), 1, 0, "ddp"
        )
        for i, (names, *_) in enumerate(BUCKETS)
    )
)
LATENCY_S, S_PER_BYTE = 1e-3, 1e-6
LINK = Collective(latency_s=LATENCY_S, s_per_byte=S_PER_BYTE)


def transfer(bucket: int, num_bytes: int, launched: float, done: float | None, *wait: float | None) -> Transfer:
    """A reduction that somebody waited for, if its times say so; a launch takes a moment."""
    begin, end = wait or (None, None)
    return reduce(bucket, launched, done, begin, end, num_bytes=num_bytes, launch_returned=launched + 5e-5)


def rank_step(rank: int, began: float, late_s: float = 0.0) -> RankStep:
    """A rank whose forward takes 20 ms; a late one launches later, and nobody's transfer begins before."""
    transfers = []
    backward = began + 0.020
    for index, (_, num_bytes, ready_s) in enumerate(BUCKETS):
        done = backward + ready_s + LATE_S + LATENCY_S + S_PER_BYTE * num_bytes
        transfers.append(transfer(index, num_bytes, backward + ready_s + late_s, done))
    return RankStep(
        rank=rank, began=began, backward_began=backward, ended=began + 0.1, transfers=tuple(transfers), drained_s=0.0
    )


LATE_S = 0.015


def measured(num_steps: int = 3) -> StepReport:
    """The last of three ranks is late in every step."""
    steps = [
        Step(number=i + 1, ranks=tuple(rank_step(rank, i * 1.0, LATE_S if rank == 2 else 0.0) for rank in range(3)))
        for i in range(num_steps)
    ]
    return StepReport(
        model="Net", algorithm="all-reduce", plan=PLAN, steps=tuple(steps), clock_error_s=0.0, device="cpu"
    )


def test_costs_with_a_late_rank() -> None:
    collective = collective_of(measured())
    assert (collective.latency_s, collective.s_per_byte) == pytest.approx((LATENCY_S, S_PER_BYTE))
    costs = costs_of(measured(), LINK)
    # c and b share a bucket that is ready after 10 ms, c having a quarter of its bytes.
    assert costs.ready_s == pytest.approx([0.040, 0.010, 0.0025])
    assert costs.forward_s == pytest.approx(0.020) and costs.launch_s == pytest.approx(5e-5)
    assert costs.needed_s == pytest.approx([0.0, 0.015, 0.020 * (1 - 1 / 16)])


def test_rounding_makes_no_time_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    for _ in range(100):
        # Where x + (y - x) is more than y for some, since the difference is rounded.
        buckets = [(("c", "b"), 4000, rng.uniform(0.03125, 0.034)), (("a",), 8000, rng.uniform(0.1, 0.125))]
        monkeypatch.setattr(sys.modules[__name__], "BUCKETS", buckets)
        report = measured(num_steps=1)
        rank = report.steps[0].ranks[0]
        exact = replace(
            rank,
            began=-0.02,
            backward_began=0.0,
            transfers=tuple(
                replace(transfer, ready=ready_s)
                for transfer, (*_, ready_s) in zip(rank.transfers, buckets, strict=True)
            ),
        )
        report = replace(report, steps=(Step(number=1, ranks=(exact,)),))
        assert 0 <= costs_of(report, LINK).needed_s[0] < 1e-15


def with_gathers(rank: RankStep, times: Sequence[tuple[int, int, float, float | None, float | None]]) -> RankStep:
    """Gathers of the step before: bucket, bytes, launch, and wait, in seconds since the forward began."""
    gathers = []
    for bucket, num_bytes, launched, *wait in times:
        begin, end = (None if at is None else rank.began + at for at in wait)
        gathers.append(replace(transfer(bucket, num_bytes, rank.began + launched, None, begin, end), kind="gather"))
    return replace(rank, transfers=(*gathers, *rank.transfers))


def costs_with_gathers(*times: tuple[int, int, float, float | None, float | None]) -> Costs:
    report = measured()
    steps = tuple(replace(step, ranks=tuple(with_gathers(rank, times) for rank in step.ranks)) for step in report.steps)
    return costs_of(replace(report, steps=steps), LINK)


def test_sharded_optimizer() -> None:
    # 1 ms for 8000 bytes, and 2 ms for 4000; the forward waits 4 of the 9 ms of the last wait.
    costs = costs_with_gathers((1, 8000, -0.010, None, None), (0, 4000, -0.008 + 5e-5, -0.005, 0.004))
    assert costs.forward_s == pytest.approx(0.016)
    assert costs.step_s_per_byte == pytest.approx(3 * 0.002 / 4000)  # three ranks step a third each
    # It did not wait for both buckets, so the forward is taken to mirror the backward.
    assert costs.needed_s == pytest.approx([0.0, 0.012, 0.016 * (1 - 1 / 16)])
    assert costs_of(measured(), LINK).step_s_per_byte == 0.0


def test_needs_are_where_the_forward_waits() -> None:
    # It reads "a" after 1 ms and waits 3 ms; the other bucket is read 2 ms later, and what it waited for is there.
    costs = costs_with_gathers((1, 8000, -0.010, 0.001, 0.004), (0, 4000, -0.008, 0.006, 0.006))
    assert costs.forward_s == pytest.approx(0.017)
    # Of the last 14 ms, three quarters of the bytes, "b", pass before "c" is read.
    assert costs.needed_s == pytest.approx([0.001, 0.003, 0.003 + 0.014 * 3 / 4])


def test_all_reduce_of_a_sharded_optimizer() -> None:
    """A reduction and a gather together; gathers here take twice as long as reductions."""

    def done(transfer: Transfer) -> Transfer:
        end = transfer.launched + 2 * LINK.time_s(transfer.num_bytes)
        return replace(transfer, done=end) if transfer.kind == "gather" else transfer

    report, times = measured(), [(1, 8000, -0.060, None, None), (0, 4000, -0.030, None, None)]
    ranks_of = [[with_gathers(rank, times) for rank in step.ranks] for step in report.steps]
    steps = tuple(
        replace(step, ranks=tuple(replace(rank, transfers=tuple(map(done, rank.transfers))) for rank in ranks))
        for step, ranks in zip(report.steps, ranks_of, strict=True)
    )
    both = all_reduce_of(replace(report, steps=steps))
    assert (both.latency_s, both.s_per_byte) == pytest.approx((3 * LATENCY_S, 3 * S_PER_BYTE))
    assert all_reduce_of(report).latency_s == pytest.approx(LATENCY_S)


def test_profiles_that_say_too_little() -> None:
    with pytest.raises(ValueError, match="the profile has gather transfers of 0 sizes whose end is known"):
        collective_of(measured(), "gather")
    with pytest.raises(ValueError, match="the profile has 0 steps, and none in which every bucket is reduced; measure"):
        costs_of(replace(measured(), steps=()), LINK)


def test_times_that_give_no_rate() -> None:
    report = measured()
    swapped = BucketPlan(renumbered(report.plan.buckets[::-1]))
    with pytest.raises(ValueError, match=r"4000 bytes took 9\.000 ms and 8000 bytes took 5\.000 ms, so the times give"):
        collective_of(replace(report, plan=swapped))
