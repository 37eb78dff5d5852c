"""What reports of simulated steps advise, word for word, and what they must not say."""

import re
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from simulated_steps import MIB, Simulation, six_buckets

from ddp_compile.report.page import render_page
from ddp_compile.report.step_report import StepReport
from ddp_compile.report.steps import RankStep


def texts(report: StepReport) -> str:
    return "\n".join(advice.text for advice in report.advice())


def test_last_bucket_and_late_rank() -> None:
    report = six_buckets(ranks=4, late={3: 0.012}, late_in=0.9)
    assert_expected_inline(
        texts(report),
        """\
bucket 5 (embedding.weight, positions.weight, blocks.0.norm.weight, blocks.0.norm.bias) is exposed for 43 ms in the median: it is launched last and nothing is left to hide it
rank 3 arrives late in 90 % of steps, by 12 ms in the median""",  # noqa: E501
    )
    exposed, late = report.advice()
    assert (exposed.kind, exposed.bucket, exposed.ranks) == ("reduce", 5, ())
    assert exposed.seconds == pytest.approx(0.001 + 40 * MIB / 1e9)
    assert (late.kind, late.bucket, late.ranks) == ("late", None, (3,))
    assert late.seconds == pytest.approx(0.012)


def test_advice_names_the_bucket_in_red() -> None:
    """One rank alone waits: on the other one the computation hides the transfer."""
    report = six_buckets()
    steps = tuple(replace(s, ranks=(s.ranks[0], computing_for(1.0, s.ranks[1]))) for s in report.steps)
    page = render_page(report := replace(report, steps=steps))
    rows = re.findall(r'</i>(\d)</td>.*<td( class="high")?>([\d.]+)</td></tr>', page)
    assert [(int(bucket), ms) for bucket, is_red, ms in rows if is_red] == [(5, "42.9")]
    assert [(advice.bucket, round(1e3 * advice.seconds, 1)) for advice in report.advice()] == [(5, 42.9)]
    assert "exposed 43 ms (most in bucket 5)" in page


def computing_for(longer_s: float, rank: RankStep) -> RankStep:
    """The same, but it begins to wait for the last transfer later."""
    *others, last = rank.transfers
    assert last.waited_from is not None
    return replace(rank, transfers=(*others, replace(last, waited_from=last.waited_from + longer_s)))


def test_gathers() -> None:
    buckets = [([f"layers.{i}"], 8 * MIB) for i in range(3)]
    assert_expected_inline(
        texts(Simulation(buckets=buckets, ready=[0.2, 0.3, 0.4], forward_s=0.015, gathered=True).run()),
        """\
bucket 2 (layers.2) is exposed for 9.4 ms in the median: it is launched last and nothing is left to hide it
the forward waits 9.4 ms for the gather of bucket 2 in the median
the forward waits 4.4 ms for the gather of bucket 1 in the median
the forward waits 4.4 ms for the gather of bucket 0 in the median""",
    )


def test_no_advice() -> None:
    hidden = Simulation(buckets=[(["a"], MIB), (["b"], MIB)], ready=[0.1, 1.0])
    assert hidden.run().advice() == (), "2 ms of a second"
    four = six_buckets(steps=4, late={1: 0.012})
    assert four.advice() == ()
    assert len(six_buckets(steps=5, late={1: 0.012}).advice()) == 2
    assert six_buckets(clock_error_s=0.05, late={1: 0.012}).advice() == (), "clocks that are 50 ms apart"
    assert "rank 1" not in texts(six_buckets(late={1: 0.012}, late_in=0.6))


def test_ranks_that_take_turns() -> None:
    report = six_buckets(ranks=2, late={0: 0.03})
    turns = tuple(
        replace(step, ranks=tuple(replace(each, rank=each.rank ^ i % 2) for each in step.ranks))
        for i, step in enumerate(report.steps)
    )
    assert "rank 0 arrives late in 100 % of steps" in texts(report)
    assert_expected_inline(
        texts(replace(report, steps=turns)).splitlines()[-1],
        """the last rank arrives 30 ms late in the median, and it is not always the same rank""",
    )


def test_unknown_ends() -> None:
    known = six_buckets()
    report = replace(
        known, steps=tuple(replace(step, ranks=tuple(map(without_ends, step.ranks))) for step in known.steps)
    )
    assert_expected_inline(
        texts(report),
        """bucket 5 (embedding.weight, positions.weight, blocks.0.norm.weight, blocks.0.norm.bias) is exposed for 43 ms in the median""",  # noqa: E501
    )
    assert render_page(report).count("<td>unknown</td>") == 6
    sentence = "nothing reported when reductions ended"
    assert sentence in render_page(report) and sentence in str(report)
    assert sentence not in render_page(known) and sentence not in str(known)


def without_ends(rank: RankStep) -> RankStep:
    return replace(rank, transfers=tuple(replace(transfer, done=None) for transfer in rank.transfers))
