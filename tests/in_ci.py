"""Selects the cases of a test for CI, if other tests or the fuzzer cover the other combinations."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def only(in_ci: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases for `pytest.mark.parametrize`, marked ``long`` except for those ``in_ci``, which must be among them."""
    cases = list(cases)
    unknown = [case for case in in_ci if case not in cases]
    assert not unknown, f"there are no cases {unknown}"
    return [_param(case, [] if case in in_ci else [pytest.mark.long]) for case in cases]


def _param(case: Any, marks: list[pytest.MarkDecorator]) -> Any:
    return pytest.param(*case, marks=marks) if isinstance(case, tuple) else pytest.param(case, marks=marks)
