"""Clocks of ranks are aligned from all-gathers alone; each rank here is a thread with a clock of its own."""

import random

import pytest

from ddp_compile.runtime.comm import host_clock
from ddp_compile.runtime.comm.host_clock import Offset

ROUNDS = 16


def rounds_of(offsets_ns: list[int], seed: int) -> list[tuple[list[int], list[int]]]:
    """For each rank its begins and ends, an end beside the begin of the next round: ranks come late, messages vary."""
    draw = random.Random(seed)
    now, times = 10**9, [([], []) for _ in offsets_ns]  # type: ignore[var-annotated]
    ended = [0] * len(offsets_ns)
    for _ in range(ROUNDS + 1):
        begun = [now + draw.randrange(50_000_000) for _ in offsets_ns]
        for rank, (begins, ends) in enumerate(times):
            begins.append(begun[rank] - offsets_ns[rank])
            ends.append(ended[rank])
        ended = [max(begun) + draw.randrange(30_000, 900_000) - offset for offset in offsets_ns]
        now = max(begun) + 1_000_000
    return times


@pytest.mark.parametrize("seed", range(5))
def test_offset_is_within_its_error(seed: int) -> None:
    true = [0, 3_600 * 10**9, -12_345_678, 1]
    times = rounds_of(true, seed)
    found = [host_clock._offset(*times[0], *each) for each in times]
    assert found[0] == Offset(0, 0)
    for offset, expected in zip(found[1:], true[1:], strict=True):
        assert abs(offset.ns - expected) <= offset.error_ns
        # Far less than the 50 ms by which ranks come late: some round had each of both as its last one.
        assert offset.error_ns < 25_000_000


def test_drift() -> None:
    assert Offset(100, 5).and_later(Offset(140, 9)) == Offset(120, 29)
