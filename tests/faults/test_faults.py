"""Faults while training: no process is left behind, exit codes tell what happened, and losses go on as before."""

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults import TORCHRUN_KILLS_AFTER_S, Run, is_complete, train
from trainee import FAULTY_STEP, GROUP_TIMEOUT_S, POINTS, STEPS_BETWEEN_CHECKPOINTS, WAYS

CHECKPOINT = FAULTY_STEP // STEPS_BETWEEN_CHECKPOINTS * STEPS_BETWEEN_CHECKPOINTS
LossesOf = Callable[[str], list[dict[int, float]]]
#: What starting twice and training take on a busy machine.
START_S = 60.0

needs_own_network = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, for a network of its own"
)


@pytest.fixture(scope="session")
def losses_of(tmp_path_factory: pytest.TempPathFactory) -> LossesOf:
    """The losses of a run to which nothing happens, by way to train."""

    @functools.cache
    def undisturbed(way: str) -> list[dict[int, float]]:
        run = train(tmp_path_factory.mktemp("undisturbed"), way)
        assert run.exit_code == 0 and is_complete(run) and [len(lives) for lives in run.lives] == [1, 1], run.output
        return run.losses

    return undisturbed


def assert_resumed(run: Run, expected: list[dict[int, float]]) -> None:
    """It ended well, after one restart from a checkpoint."""
    assert run.exit_code == 0 and run.left_behind == [], run.output
    assert [[life.begins_after for life in lives] for lives in run.lives] == [[0, CHECKPOINT]] * 2, run.output
    assert is_complete(run) and run.losses == expected


#: Every point of a step with all-reduce, and one with each other way, since a run takes about a minute.
PLACES = [
    *(("default", point) for point in POINTS),
    ("sharded", "optimizer"),
    ("ring", "backward"),
    ("diloco", "after the step"),
]
CASES = [*((way, "kill", at) for way, at in PLACES), *((way, "out of memory", "backward") for way in WAYS)]


@pytest.mark.long
@pytest.mark.parametrize(("way", "fault", "at"), CASES)
def test_a_rank_that_ends_is_started_again(way: str, fault: str, at: str, losses_of: LossesOf, tmp_path: Path) -> None:
    run = train(tmp_path, way, fault, at)
    assert_resumed(run, losses_of(way))
    if fault == "out of memory":
        assert "DefaultCPUAllocator" in run.output


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_stands_still_is_started_again(way: str, losses_of: LossesOf, tmp_path: Path) -> None:
    run = train(tmp_path, way, "stop")
    assert_resumed(run, losses_of(way))
    assert run.seconds < START_S + GROUP_TIMEOUT_S + TORCHRUN_KILLS_AFTER_S
    assert "ReductionError" in run.output


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        pytest.param("link cut and healed", {"is_isolated": True}, marks=needs_own_network),
        ("store frozen", {"shares_store": True}),
    ],
)
def test_what_passes_in_time_changes_nothing(
    fault: str, settings: Any, way: str, losses_of: LossesOf, tmp_path: Path
) -> None:
    run = train(tmp_path, way, fault, **settings)
    assert run.exit_code == 0 and run.left_behind == [], run.output
    assert [len(lives) for lives in run.lives] == [1, 1] and run.losses == losses_of(way)


@needs_own_network
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_link_cut_for_longer_than_timeout(way: str, losses_of: LossesOf, tmp_path: Path) -> None:
    run = train(tmp_path, way, "link cut", is_isolated=True)
    assert_resumed(run, losses_of(way))
    assert "ReductionError" in run.output


@pytest.mark.long
@pytest.mark.parametrize(("way", "point"), PLACES)
def test_ctrl_c_ends_every_process(way: str, point: str, losses_of: LossesOf, tmp_path: Path) -> None:
    run = train(tmp_path, way, "ctrl-c", point, ctrl_c=True)
    assert run.exit_code != 0 and run.left_behind == [], run.output
    assert run.seconds < GROUP_TIMEOUT_S + 10, run.output
    again = train(tmp_path, way)
    assert_resumed(again, losses_of(way))
