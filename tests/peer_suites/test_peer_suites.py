"""The verdicts on torch's own tests with ddp_compile; run.py runs the tests themselves."""

import pytest
from peer_suites.verdict import COMPILED, FAILED, PASSED, REFUSED, Listed, judge

CREATE_GRAPH = Listed(REFUSED, "create_graph=True", "the mean does not lead back")
ZEROS = Listed(COMPILED, "zeros, not None", "AOTAutograd computes them")


@pytest.mark.parametrize(
    ("passed", "error", "listed", "eagerly", "row"),
    [
        (True, "", None, True, PASSED),
        (False, "AssertionError: 1 != 2", None, True, FAILED),
        (False, "RuntimeError: backward(create_graph=True) is refused", CREATE_GRAPH, False, REFUSED),
        (True, "", CREATE_GRAPH, True, FAILED),
        (False, "AssertionError: 1 != 2", CREATE_GRAPH, True, FAILED),
        (False, "AssertionError: zeros, not None", ZEROS, True, COMPILED),
        (False, "AssertionError: zeros, not None", ZEROS, False, FAILED),
    ],
)
def test_a_listed_test_has_to_fail_as_it_says(
    passed: bool, error: str, listed: Listed | None, eagerly: bool, row: str
) -> None:
    assert judge(passed, error, listed, lambda: eagerly)[0] == row
