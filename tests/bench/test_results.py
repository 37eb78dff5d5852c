"""The arithmetic of the summary, on figures made by hand, and the files of a run."""

import pytest

from ddp_compile.bench.results import CaseResult, ideal_step_s, median_ratio, summarize
from ddp_compile.bench.settings import Case, Prepared, StepRecord


def steps(step_s: float, *, backward_s: float = 0.0, cpu_s: float = 0.0) -> list[StepRecord]:
    return [StepRecord(step_s, step_s - backward_s, backward_s, 0.0, cpu_s)]


def case_result(name: str, *rounds: list[StepRecord], cap: float = 25.0) -> CaseResult:
    return CaseResult(Case(implementation=name, bucket_cap_mb=cap), rounds={"1gbit": list(rounds)})


def test_ideal_hides_communication_beneath_the_backward() -> None:
    local = case_result("local", steps(10.0, backward_s=6.0))
    assert ideal_step_s(local, case_result("communication", steps(5.0, cpu_s=1.0)), "1gbit") == 11.0
    assert ideal_step_s(local, case_result("communication", steps(9.0, cpu_s=1.0)), "1gbit") == 13.0
    # Of several backwards only the last one hides communication.
    local = CaseResult(Case(implementation="local", no_sync_every=3), rounds=local.rounds)
    assert ideal_step_s(local, case_result("communication", steps(5.0, cpu_s=1.0)), "1gbit") == 13.0


@pytest.mark.parametrize(("num_rounds", "low", "high"), [(3, 0, 2), (6, 0, 5), (9, 1, 7), (12, 2, 9), (20, 5, 14)])
def test_interval_of_a_median_is_that_of_the_sign_test(num_rounds: int, low: int, high: int) -> None:
    ours = [steps(float(i)) for i in range(num_rounds)]
    median, below, above = median_ratio(ours, [steps(1.0)] * num_rounds)
    assert (below, above) == (low, high)
    assert median == (num_rounds - 1) / 2


def test_ratios_are_taken_round_by_round() -> None:
    """If the machine slows down for all cases in some rounds, the ratio does not change."""
    drift = [1.0, 5.0, 2.0, 1.0, 9.0, 1.0, 3.0]
    ours, theirs = [steps(0.9 * d) for d in drift], [steps(d) for d in drift]
    assert median_ratio(ours, theirs) == pytest.approx((0.9, 0.9, 0.9))


def test_the_best_peer_is_the_fastest_one_whatever_its_capacity() -> None:
    results = [
        case_result("local", steps(1.0)),
        case_result("communication", steps(1.0)),
        case_result("peer", steps(4.0), cap=25.0),
        case_result("peer", steps(3.0), cap=5.0),
        case_result("ours", steps(1.5)),
    ]
    rows = {(row.implementation, row.bucket_cap_mb): row for row in summarize(results, ["1gbit"], {}, ["peer"])}
    assert rows["ours", 25.0].ratio_to_best_peer == 0.5
    assert rows["peer", 5.0].ratio_to_best_peer == 1.0
    assert rows["local", 25.0].ratio_to_best_peer is None
    assert rows["ours", 25.0].exposed_ms == pytest.approx(500.0)


def test_a_case_that_failed_on_the_way_is_compared_with_nothing() -> None:
    broken = case_result("peer", steps(1.0))
    broken.error = "RuntimeError: gone"
    whole = case_result("ours", steps(2.0), steps(2.0))
    rows = summarize([broken, whole], ["1gbit"], {}, ["peer"])
    assert (rows[0].status, rows[0].error, rows[0].step_ms) == ("failed", "RuntimeError: gone", None)
    assert rows[1].ratio_to_best_peer is None and rows[1].step_ms == 2000.0


def test_compile_seconds_are_what_the_first_steps_took_beyond_steady_ones() -> None:
    result = case_result("ours", steps(2.0))
    result.cold = Prepared(num_parameters=1, gradient_bytes=4, warmup_s=[12.0, 2.0, 3.0, 2.0], num_graphs=1)
    (row,) = summarize([result], ["1gbit"], {}, [])
    assert row.cold_compile_s == pytest.approx(11.0)  # 10 in the first step, 1 in the third
    assert row.warm_compile_s is None
