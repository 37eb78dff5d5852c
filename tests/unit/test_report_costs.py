"""Costs from measured steps: the line through transfers, times of gradients, and reports that do not fit."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ddp_compile.plan.costs import Collective, Computation
from ddp_compile.report.costs import collective_of, computation_of
from ddp_compile.report.steps import BucketInfo, RankStep, Step, StepReport, Transfer

SIZES = {"c": 1000, "b": 3000, "a": 8000}  # in the order in which they are ready
BUCKETS = [(("c", "b"), 4000, 0.010), (("a",), 8000, 0.040)]
LATENCY_S, S_PER_BYTE = 1e-3, 1e-6
LINK = Collective(latency_s=LATENCY_S, s_per_byte=S_PER_BYTE)


def rank_step(rank: int, began: float, late_s: float = 0.0) -> RankStep:
    """A rank whose forward takes 20 ms; a late one launches later, and nobody's transfer begins before."""
    transfers = []
    backward = began + 0.020
    for index, (_, num_bytes, ready_s) in enumerate(BUCKETS):
        ready = backward + ready_s + late_s
        done = began + 0.020 + ready_s + LATE_S + LATENCY_S + S_PER_BYTE * num_bytes
        transfers.append(
            Transfer(
                bucket=index,
                kind="reduce",
                num_bytes=num_bytes,
                ready=ready,
                launched=ready,
                launch_returned=ready + 5e-5,
                done=done,
                waited_from=None,
                waited_until=None,
            )
        )
    return RankStep(
        rank=rank, began=began, backward_began=backward, ended=began + 0.1, transfers=tuple(transfers), drained_s=0.0
    )


LATE_S = 0.015


def measured(num_ranks: int = 3, num_steps: int = 3) -> StepReport:
    """The last rank is late in every step."""
    steps = [
        Step(
            number=number + 1,
            ranks=tuple(
                rank_step(rank, number * 1.0, LATE_S if rank == num_ranks - 1 else 0.0) for rank in range(num_ranks)
            ),
        )
        for number in range(num_steps)
    ]
    return StepReport(
        model="Net",
        algorithm="all-reduce",
        plan_digest="0" * 16,
        buckets=tuple(
            BucketInfo(index=i, names=names, num_bytes=num_bytes, dtype="float32")
            for i, (names, num_bytes, _) in enumerate(BUCKETS)
        ),
        steps=steps,
        clock_error_s=0.0,
        device="cpu",
    )


NAMES = ["a", "b", "c"]
NUM_BYTES = [SIZES[name] for name in NAMES]


def test_latency_and_rate_are_those_of_transfers_apart_from_a_late_rank() -> None:
    collective = collective_of(measured(), world_size=3)
    assert collective.latency_s == pytest.approx(LATENCY_S)
    assert collective.s_per_byte == pytest.approx(S_PER_BYTE)


def test_times_of_the_computation_are_medians_that_one_late_rank_does_not_move() -> None:
    computation = computation_of(measured(), NAMES, NUM_BYTES)
    # c and b share a bucket that is ready after 10 ms, c having a quarter of its bytes.
    assert computation.ready_s == pytest.approx([0.040, 0.010, 0.0025])
    assert computation.forward_s == pytest.approx(0.020) and computation.launch_s == pytest.approx(5e-5)
    assert computation.needed_s == pytest.approx([0.0, 0.015, 0.020 * (1 - 1 / 16)])


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
        report = replace(report, steps=[Step(number=1, ranks=(exact,))])
        computation = computation_of(report, NAMES, NUM_BYTES)
        assert 0 <= computation.with_transfers(LINK, LINK).needed_s[0] < 1e-15


def with_gathers(rank: RankStep, times: Sequence[tuple[int, int, float, float | None, float | None]]) -> RankStep:
    """Gathers of the step before: bucket, bytes, launch, and wait, in seconds since the forward began."""
    gathers = [
        Transfer(
            bucket=bucket,
            kind="gather",
            num_bytes=num_bytes,
            ready=rank.began + launched,
            launched=rank.began + launched,
            launch_returned=rank.began + launched + 5e-5,
            done=None,
            waited_from=None if begin is None else rank.began + begin,
            waited_until=None if end is None else rank.began + end,
        )
        for bucket, num_bytes, launched, begin, end in times
    ]
    return replace(rank, transfers=(*gathers, *rank.transfers))


def computation_with_gathers(*times: tuple[int, int, float, float | None, float | None]) -> Computation:
    report = measured()
    steps = [replace(step, ranks=tuple(with_gathers(rank, times) for rank in step.ranks)) for step in report.steps]
    return computation_of(replace(report, steps=steps), NAMES, NUM_BYTES)


def test_a_sharded_optimizer_waits_in_the_forward_and_steps_between_gathers() -> None:
    # 1 ms for 8000 bytes, and 2 ms for 4000; the forward waits 4 of the 9 ms of the last wait.
    computation = computation_with_gathers((1, 8000, -0.010, None, None), (0, 4000, -0.008 + 5e-5, -0.005, 0.004))
    assert computation.forward_s == pytest.approx(0.016)
    assert computation.step_s_per_byte == pytest.approx(3 * 0.002 / 4000)  # three ranks step a third each
    # It did not wait for both buckets, so the forward is taken to mirror the backward.
    assert computation.needed_s == pytest.approx([0.0, 0.012, 0.016 * (1 - 1 / 16)])
    assert computation_of(measured(), NAMES, NUM_BYTES).step_s_per_byte == 0.0


def test_the_forward_reads_parameters_when_it_waits_for_them() -> None:
    # It reads "a" after 1 ms and waits 3 ms; the other bucket is read 2 ms later, and what it waited for is there.
    computation = computation_with_gathers((1, 8000, -0.010, 0.001, 0.004), (0, 4000, -0.008, 0.006, 0.006))
    assert computation.forward_s == pytest.approx(0.017)
    # Of the last 14 ms, three quarters of the bytes, "b", pass before "c" is read.
    assert computation.needed_s == pytest.approx([0.001, 0.003, 0.003 + 0.014 * 3 / 4])


def test_a_bucket_that_is_read_first_may_be_the_one_whose_gradients_come_first() -> None:
    computation = computation_with_gathers((1, 8000, -0.010, 0.006, 0.006), (0, 4000, -0.008, 0.002, 0.002))
    assert computation.needed_s == pytest.approx([0.006, 0.002, 0.002 + 0.004 * 3 / 4])


def test_a_parameter_that_the_backward_waits_for_is_needed_at_the_end_of_the_forward() -> None:
    computation = computation_with_gathers((1, 8000, -0.010, 0.0, 0.0), (0, 4000, -0.008, 0.030, 0.031))
    assert computation.needed_s == pytest.approx([0.0, 0.020, 0.020])


def test_a_report_comes_back_from_its_json_with_the_same_costs() -> None:
    again = StepReport.from_json(measured().to_json())
    assert collective_of(again, 3) == collective_of(measured(), 3)


def test_the_profile_of_another_model_is_refused_with_both_sides() -> None:
    with pytest.raises(
        ValueError,
        match=r"the profile is of Net with 3 parameters, and this model has 2; only in the profile: b, c; only in the"
        " model: d. Measure this model",
    ):
        computation_of(measured(), ["a", "d"], [1, 1])


def test_the_link_of_another_world_is_refused_with_both_sides() -> None:
    with pytest.raises(ValueError, match="the profile is of 3 ranks, and the plan is for 64; pass --bandwidth and"):
        collective_of(measured(), 64)


def test_a_profile_without_what_is_asked_is_refused() -> None:
    with pytest.raises(ValueError, match="the profile has gather transfers of 0 sizes, and a latency and a rate need"):
        collective_of(measured(), 3, "gather")
    with pytest.raises(ValueError, match="the profile has 0 steps, and not every bucket is reduced in one; measure"):
        computation_of(replace(measured(), steps=[]), NAMES, NUM_BYTES)


def test_more_bytes_that_take_no_longer_are_no_rate() -> None:
    report = measured()
    infos = tuple(replace(info, num_bytes=12_000 - info.num_bytes) for info in report.buckets)
    with pytest.raises(ValueError, match=r"4000 bytes take 9\.000 ms and 8000 bytes take 5\.000 ms, which is no"):
        collective_of(replace(report, buckets=infos), 3)


@pytest.mark.parametrize("factor", [0.5, 2])
def test_a_report_of_other_shapes_or_another_dtype_is_refused_with_both_sizes(factor: float) -> None:
    sizes = [int(size * factor) for size in NUM_BYTES]
    with pytest.raises(
        ValueError, match=r"the profile's bucket 0 has \d+ bytes, and this model's gradients of .* have"
    ):
        computation_of(measured(), NAMES, sizes)
