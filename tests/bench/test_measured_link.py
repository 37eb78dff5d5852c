"""What ``model.measure()`` says on simulated links, where the truth is known; benchmarks/bench_measure.py does more."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.alone
SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "bench_measure.py"))
SETTINGS = SCRIPT["SETTINGS"]


def test_the_truth_follows_from_the_sleeps() -> None:
    def truth(**times: Any) -> Any:
        return SCRIPT["Setting"](forward_s=1.0, backward_s=2.0, **times).truth

    assert truth(transfer_s=1.5) == (1.5, 1.5, 6.0, 0.0)  # the last one
    assert truth(transfer_s=3.0) == (6.0, 3.0, 12.0, 0.0)  # 4 * 3 that begin after 2, and end after 14 instead of 8
    assert truth(transfer_s=1.5, sharded=True, between_s=5.0) == (2.5, 1.5, 12.0, 0.0)
    assert truth(late_s=0.4).lateness_s == 0.4


@pytest.mark.parametrize("place", [0, 1, 5])
def test_exposed_and_transferred_time_are_right_within_5_percent(place: int) -> None:
    setting = SETTINGS[place]
    for _ in range(3):  # what else the machine does lengthens sleeps and transfers, and then this is not the truth
        found = SCRIPT["on_simulated_link"](setting, steps=5)
        if all(said == pytest.approx(true, rel=0.05) for said, true in zip(found, setting.truth, strict=True)):
            return
    assert found == setting.truth
