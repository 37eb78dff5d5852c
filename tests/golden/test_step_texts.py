"""The texts of measured steps: one line for a log, and the table."""

import re

from expecttest import assert_expected_inline
from simulated_steps import rank_step, reduce, report_of, step_with_late_rank

from ddp_compile.report.steps import Step


def test_nothing_is_sent() -> None:
    step = Step(number=1, ranks=(rank_step(0),))
    assert_expected_inline(str(step), """compute 100 ms""")
    assert step.most_exposed_bucket is None


def test_ends_are_not_known_and_launches_wait() -> None:
    slow = reduce(0, 0.04, None, 0.08, 0.09, launch_returned=0.052)
    step = Step(number=1, ranks=(rank_step(0, slow, drained_s=0.0034),))
    assert_expected_inline(
        str(step).replace(", ", "\n"),
        """\
compute 75 ms
launching 12 ms
communication unknown
exposed 13 ms (bucket 0
3.4 ms outside of buckets)""",
    )


def test_table() -> None:
    unknown = Step(number=9, ranks=tuple(rank_step(rank, reduce(0, 0.01, None, 0.02, 0.03)) for rank in (2, 3)))
    report = report_of(step_with_late_rank(7), step_with_late_rank(8), unknown)
    assert_expected_inline(
        re.sub("plan [0-9a-f]{16}", "plan <digest>", str(report)),
        """\
Mlp, gradient all-reduce: 3 steps of 2 ranks, 2 buckets, plan <digest>; times in ms, clocks within 0.025 ms
  step  all  compute  launching  communication  exposed   most in         late
     7   92       66          0             50       30  bucket 1  20 (rank 3)
     8   92       66          0             50       30  bucket 1  20 (rank 3)
     9  100       90          0        unknown       10  bucket 0
median   92       66          0             50       30
Unknown times: nothing reported when reductions ended. Waits for them were still measured.""",
    )
