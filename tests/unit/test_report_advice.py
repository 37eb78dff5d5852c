"""What reports of simulated steps advise, word for word, and what they must not say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from simulated_steps import MIB, Simulation, many_buckets, six_buckets

from ddp_compile.report.page import render_page
from ddp_compile.report.replay import Link, Sent, best_split, exposed_after, fit_link
from ddp_compile.report.steps import RankStep, StepReport


def texts(report: StepReport) -> str:
    return "\n".join(advice.text for advice in report.advice())


def test_a_last_bucket_and_a_late_rank() -> None:
    report = six_buckets(ranks=4, late={3: 0.012}, late_in=0.9)
    assert_expected_inline(
        texts(report),
        """\
bucket 5 (embedding.weight, positions.weight, blocks.0.norm.weight, blocks.0.norm.bias) is exposed for 43 ms on every rank in the median: it is launched last and nothing is left to hide it; 4 buckets in its place would hide about 31 ms, if its gradients become ready at an even pace
rank 3 arrives late in 90 % of steps, by 12 ms in the median""",  # noqa: E501
    )
    exposed, late = report.advice()
    assert (exposed.kind, exposed.bucket, exposed.ranks) == ("reduce", 5, ())
    assert exposed.seconds == pytest.approx(0.001 + 40 * MIB / 1e9)
    assert (late.kind, late.bucket, late.ranks) == ("late", None, (3,))
    assert late.seconds == pytest.approx(0.012)


def test_several_late_ranks_are_one_sentence() -> None:
    report = six_buckets(ranks=4, late={2: 0.012, 3: 0.015})
    assert "ranks 2-3 arrive late in at least 100 % of steps, by 12 ms in the median or more" in texts(report)


def test_a_link_that_is_busy() -> None:
    buckets = [(["a", "b"], 40 * MIB), (["c", "d"], 20 * MIB)]
    assert_expected_inline(
        texts(Simulation(buckets=buckets, ready=[0.08, 0.1]).run()),
        """\
bucket 0 (a, b) is exposed for 23 ms on every rank in the median; 2 buckets in its place would hide about 21 ms, if its gradients become ready at an even pace
bucket 1 (c, d) is exposed for 22 ms on every rank in the median: the transfers before it end 23 ms after its launch""",  # noqa: E501
    )


def test_a_last_bucket_of_which_a_part_is_hidden() -> None:
    report = six_buckets()
    steps = [replace(step, ranks=tuple(computing_for(0.01, rank) for rank in step.ranks)) for step in report.steps]
    text = texts(replace(report, steps=steps))
    assert "bucket 5" in text and "is exposed for 33 ms" in text
    assert "nothing is left" not in text


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
bucket 2 (layers.2) is exposed for 9.4 ms on every rank in the median: it is launched last and nothing is left to hide it
the forward waits 9.4 ms for the gather of bucket 2 on every rank in the median
the forward waits 4.4 ms for the gather of bucket 1 on every rank in the median
the forward waits 4.4 ms for the gather of bucket 0 on every rank in the median""",  # noqa: E501
    )


def test_many_small_waits_are_said_together() -> None:
    assert_expected_inline(
        texts(many_buckets()),
        """\
60 gathers are exposed for 538 ms together on every rank in the median, each for less than 15 ms
11 reductions are exposed for 120 ms together on every rank in the median, each for less than 15 ms""",
    )


def test_nothing_is_said_without_a_reason() -> None:
    hidden = Simulation(buckets=[(["a"], MIB), (["b"], MIB)], ready=[0.1, 1.0])
    assert hidden.run().advice() == (), "2 ms of a second"
    four = six_buckets(steps=4, late={1: 0.012})
    assert four.advice() == ()
    assert len(six_buckets(steps=5, late={1: 0.012}).advice()) == 2
    assert six_buckets(clock_error_s=0.05, late={1: 0.012}).advice() == (), "clocks that are 50 ms apart"
    assert "rank 1" not in texts(six_buckets(late={1: 0.012}, late_in=0.6))


def test_two_ranks_that_vary_are_not_late() -> None:
    report = six_buckets(ranks=2, late={0: 0.03})
    turns = [
        replace(step, ranks=tuple(replace(each, rank=each.rank ^ i % 2) for each in step.ranks))
        for i, step in enumerate(report.steps)
    ]
    assert "rank 0 arrives late in 100 % of steps" in texts(report)
    assert_expected_inline(
        texts(replace(report, steps=turns)).splitlines()[-1],
        """the last rank arrives 30 ms late in the median, and it is not always the same one""",
    )


def test_a_bucket_of_one_parameter_is_not_told_to_be_smaller() -> None:
    buckets = [(["a"], 4 * MIB), (["embedding.weight"], 40 * MIB)]
    assert_expected_inline(
        texts(Simulation(buckets=buckets, ready=[0.05, 0.12]).run()),
        """bucket 1 (embedding.weight) is exposed for 43 ms on every rank in the median: it is launched last and nothing is left to hide it""",  # noqa: E501
    )


def test_buckets_of_one_size_do_not_tell_what_a_smaller_one_takes() -> None:
    buckets = [(["a", "b"], 4 * MIB), (["c", "d"], 4 * MIB)]
    assert "in its place" not in texts(Simulation(buckets=buckets, ready=[0.05, 0.12]).run())


def test_the_link_is_found_from_its_transfers() -> None:
    sent = [Sent(n, 0.0, 0.0, 0.003 + n / 5e8) for n in (MIB, 3 * MIB, 17 * MIB)]
    assert fit_link(sent) == pytest.approx((0.003, 1 / 5e8))
    assert fit_link(sent[:1] * 2) is None
    assert fit_link([Sent(n, 0.0, 0.0, 1.0 / n) for n in (1, 2, 3)]) is None, "larger ones are faster"
    through_zero = fit_link([Sent(n, 0.0, 0.0, n * 1e-9 - 1e-4) for n in (MIB, 2 * MIB)])
    assert through_zero is not None and through_zero.latency_s == 0.0


@pytest.mark.parametrize("latency_s", [0.0, 0.002, 0.02])
def test_what_a_split_hides_is_what_the_simulated_link_then_hides(latency_s: float) -> None:
    sizes = [4 * MIB, 40 * MIB]
    whole = Simulation(buckets=[(["a"], sizes[0]), (list("bcde"), sizes[1])], ready=[0.05, 0.13], latency_s=latency_s)
    (exposed,) = (advice for advice in whole.run().advice() if advice.bucket == 1)
    split = Simulation(
        buckets=[(["a"], sizes[0]), *(([name], sizes[1] // 4) for name in "bcde")],
        ready=[0.05, 0.07, 0.09, 0.11, 0.13],
        latency_s=latency_s,
    )
    step = split.run().steps[0]
    hidden_s = exposed.seconds - step.exposed_s
    sent = [Sent(sizes[0], 0.02, 0.05, latency_s + sizes[0] / 1e9), Sent(sizes[1], 0.05, 0.13, exposed.seconds)]
    better = best_split(sent, 1, 4, 0.13, exposed.seconds)
    if latency_s == 0.02:
        assert better is None or better.hidden_s >= hidden_s
    else:
        assert better is not None and better == pytest.approx((4, hidden_s))


def test_a_schedule_that_the_replay_does_not_find_again_tells_nothing() -> None:
    sent = [Sent(MIB, 0.0, 0.05, 0.01), Sent(10 * MIB, 0.05, 0.13, 0.1)]
    link = Link(0.0, 1e-8)
    exposed_s = exposed_after(sent, link, 0.13)
    assert best_split(sent, 1, 8, 0.13, exposed_s) is not None
    assert best_split(sent, 1, 8, 0.13, 1.3 * exposed_s) is None


def test_transfers_whose_end_is_not_known() -> None:
    known = six_buckets()
    report = replace(known, steps=[replace(step, ranks=tuple(map(without_ends, step.ranks))) for step in known.steps])
    assert_expected_inline(
        texts(report),
        """bucket 5 (embedding.weight, positions.weight, blocks.0.norm.weight, blocks.0.norm.bias) is exposed for 43 ms on every rank in the median""",  # noqa: E501
    )
    assert render_page(report).count("<td>unknown</td>") == 6
    sentence = "nothing says when reductions were over"
    assert sentence in render_page(report) and sentence in str(report)
    assert sentence not in render_page(known) and sentence not in str(known)


def without_ends(rank: RankStep) -> RankStep:
    return replace(rank, transfers=tuple(replace(transfer, done=None) for transfer in rank.transfers))
