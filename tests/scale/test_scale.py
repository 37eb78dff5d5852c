"""What ranks ask their store for grows no faster than their number, and they know within seconds."""

from __future__ import annotations

import pytest
from scale import SCENES, plan_bytes, simulate


@pytest.mark.parametrize("number", [512, pytest.param(4096, marks=pytest.mark.long)])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_traffic_is_linear_in_the_ranks(scene: object, number: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")
    few, many = simulate(scene, 64), simulate(scene, number)  # type: ignore[arg-type]
    assert many.keys / few.keys < 1.5 * number / 64
    assert many.num_bytes / few.num_bytes < 1.5 * number / 64
    assert many.most_keys < 20 * number and many.seconds < 2.0


def test_a_plan_is_small() -> None:
    assert plan_bytes(300) < 100 * 300
