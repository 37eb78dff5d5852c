"""Programs on the pretend accelerator come to the values that one process, or ranks on the CPU, come to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from device_ranks import DeviceRanks
from in_ci import only
from programs import PLACEMENTS, PROGRAMS, perform


@pytest.fixture(scope="module")
def device_ranks() -> Iterator[DeviceRanks]:
    ranks = DeviceRanks(has_stream_interface=True)
    yield ranks
    ranks.close()


CASES = [(name, placement) for placement in PLACEMENTS for name in PROGRAMS]


@pytest.mark.parametrize(("name", "placement"), CASES)
def test_parameters_are_as_expected(device_ranks: DeviceRanks, name: str, placement: str) -> None:
    for difference in device_ranks.run(perform, name, placement):
        assert difference <= PROGRAMS[name].tolerance
