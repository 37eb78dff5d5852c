"""What is derived from the records of a step: exposed time, transfers, late ranks."""

import json
from typing import Any

import pytest
from simulated_steps import rank_step, reduce, report_of, step_with_late_rank

from ddp_compile.report.step_report import StepReport
from ddp_compile.report.steps import Step


def test_late_rank() -> None:
    step = step_with_late_rank()
    assert step.transfer_s(0) == pytest.approx(0.03)
    assert step.transfer_s(1) == pytest.approx(0.02)  # from the last launch on
    assert step.communication_s == pytest.approx(0.05)
    assert step.lateness_s(3) == pytest.approx(0.02) and step.lateness_s(2) == 0
    assert step.of_rank(2).exposed_s == pytest.approx(0.03)
    assert step.exposed_by_bucket == pytest.approx({0: 0.01, 1: 0.02})
    assert step.exposed_s == pytest.approx(0.03) and step.most_exposed_bucket == 1
    assert step.duration_s == pytest.approx(0.092)
    assert (step.scalars()["step/communication_ms"], step.scalars()["step/all_ms"]) == pytest.approx((50, 92))


def test_one_link() -> None:
    both = (reduce(0, 0.01, 0.04, 0.03, 0.04), reduce(1, 0.02, 0.05, 0.04, 0.05))
    step = Step(number=1, ranks=(rank_step(0, *both),))
    assert step.transfer_s(1) == pytest.approx(0.01)
    assert step.communication_s == pytest.approx(0.04)


def test_wait_before_last_launch() -> None:
    step = Step(
        number=1,
        ranks=(rank_step(0, reduce(0, 0.01, 0.09, 0.02, 0.09)), rank_step(1, reduce(0, 0.08, 0.09, 0.08, 0.09))),
    )
    assert step.exposed_s == pytest.approx(0.01) and step.of_rank(0).exposed_s == pytest.approx(0.07)


def test_computation() -> None:
    gather = reduce(0, -0.02, 0.01, 0.0, 0.01, kind="gather", launch_returned=0.005)  # launched before the step
    slow = reduce(0, 0.04, 0.09, 0.08, 0.09, launch_returned=0.07)
    rank = rank_step(0, gather, slow, drained_s=0.006)
    assert rank.launching_s == pytest.approx(0.035)
    assert rank.exposed_s == pytest.approx(0.026)
    assert rank.computation_s == pytest.approx(0.1 - 0.01 - 0.03 - 0.01 - 0.006)
    step = Step(number=1, ranks=(rank,))
    assert step.exposed_s == pytest.approx(0.026) and step.drained_s == 0.006


def test_unknown_end() -> None:
    step = Step(number=1, ranks=(rank_step(0, reduce(0, 0.01, None, 0.02, 0.03), reduce(1, 0.02, 0.05, 0.04, 0.05)),))
    assert step.communication_s is None and step.transfer_s(0) is None
    assert step.scalars().keys() == {"step/all_ms", "step/compute_ms", "step/launching_ms", "step/exposed_ms"}
    assert step.transfer_s(1) == pytest.approx(0.03)


def test_bucket_launched_twice() -> None:
    step = Step(number=1, ranks=(rank_step(0, reduce(0, 0.01, 0.02, 0.02, 0.02), reduce(0, 0.05, 0.09, 0.06, 0.09)),))
    assert step.transfer_s(0) == pytest.approx(0.05)
    assert step.exposed_by_bucket == pytest.approx({0: 0.03})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.transfer_s(2), IndexError, "bucket=2 has no reduce in step 7; buckets that have one: 0, 1"),
        (lambda s: s.transfer_s(0, "gather"), IndexError, "has no gather in step 7; buckets that have one: none"),
        (lambda s: s.lateness_s(0), ValueError, "rank=0 is not in step 7; it has the ranks 2, 3"),
        (lambda s: s.of_rank(4), ValueError, "rank=4 is not in step 7; it has the ranks 2, 3"),
        (lambda _: StepReport.from_json("{}"), ValueError, "not the JSON of a StepReport: bucket plan is malformed"),
        (lambda _: StepReport.from_json("[1"), ValueError, "not the JSON of a StepReport: Expecting ',' delimiter"),
        (lambda _: StepReport.from_json("[1]"), ValueError, "not the JSON of a StepReport: it is a list"),
        (lambda _: StepReport.from_json(with_kind("sent")), ValueError, r"transfers\[0\].kind is 'sent', not one of"),
        (lambda _: StepReport.from_json(with_kind(None)), ValueError, r"steps\[0\].ranks\[0\].transfers\[0\].kind"),
    ],
)
def test_bad_input(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(step_with_late_rank())


def with_kind(kind: Any) -> str:
    document = json.loads(report_of(step_with_late_rank()).to_json())
    document["steps"][0]["ranks"][0]["transfers"][0]["kind"] = kind
    return json.dumps(document)
