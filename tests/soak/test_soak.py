"""``make soak`` in small: what is reported, and that growth is found."""

from __future__ import annotations

import pytest
from soak import LIMITS, MOST_SLOWDOWN, Figures, soak, what_grows

FLAT = Figures(memory_mib=300.0, threads=9, descriptors=18, groups=1, step_ms=2.0)


@pytest.mark.parametrize("name", ["default", "sharded", "asynchronous", "models"])
@pytest.mark.long
def test_a_short_run_is_flat_but_for_times(name: str) -> None:
    found, wrong = soak(name, 8 if name == "models" else 200)
    assert len(found) == 4 and found[0].step_ms > 0
    assert [text for text in wrong if not text.startswith("the step")] == []


@pytest.mark.parametrize("field", ["memory_mib", "threads", "descriptors", "groups"])
def test_what_grows_is_named(field: str) -> None:
    limit = dict(zip(("memory_mib", "threads", "descriptors", "groups"), LIMITS.values(), strict=True))[field]
    last = FLAT._replace(**{field: getattr(FLAT, field) + limit + 1})
    assert what_grows([FLAT, FLAT, FLAT, FLAT], 0) == []
    (text,) = what_grows([FLAT, FLAT, FLAT, last], 0)
    assert f"by {limit + 1:.1f}, allowed {limit:g}" in text


def test_steps_that_get_longer_are_named() -> None:
    last = FLAT._replace(step_ms=2.0 * MOST_SLOWDOWN + 0.1)
    assert what_grows([FLAT, FLAT, FLAT, last], 0) == ["the step from 2.00 to 2.70 ms, allowed 1.3 times"]
    assert what_grows([FLAT, FLAT, FLAT, last], 8) == []  # times of making models say nothing
