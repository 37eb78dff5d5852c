"""What ``model.measure()`` says on simulated links, where the truth is known; benchmarks/bench_measure.py does more."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone
SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "bench_measure.py"))
SETTINGS = SCRIPT["SETTINGS"]


@pytest.mark.parametrize("place", [1, 2, 5])
def test_exposed_and_transferred_time_are_right_within_5_percent(place: int) -> None:
    found = SCRIPT["on_simulated_link"](SETTINGS[place], steps=3)
    for what in ("exposed_s", "transfer_s", "communication_s"):
        true, said, error = SCRIPT["error_of"](found, what)
        assert abs(error) < 0.05, (what, true, said)
    assert 0.9 * SETTINGS[place].transfer_s < true / (8 if SETTINGS[place].sharded else 4)  # the truth is of the link
