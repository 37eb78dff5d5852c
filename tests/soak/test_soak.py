"""``make soak`` in small: what is reported, and that growth is found."""

import pytest
from soak import soak


@pytest.mark.parametrize("name", ["default", "sharded", "asynchronous", "models"])
@pytest.mark.long
def test_a_short_run_is_flat_but_for_times(name: str) -> None:
    found, wrong = soak(name, 8 if name == "models" else 200)
    assert len(found) == 4 and found[0].step_ms > 0
    assert [text for text in wrong if not text.startswith("the step")] == []
