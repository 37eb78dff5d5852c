"""How runs end: cleanup that an interrupt must not stop, last messages, and refusals at the start."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_compile.__main__ import main
from ddp_compile.bench import cli, rank_world
from ddp_compile.bench.rank_world import RankWorld, WorldSettings
from ddp_compile.bench.settings import WorkloadSettings

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GONE = "all processes, namespaces and temporary files of the run are gone"


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Exit status and message of a run whose measuring is replaced."""

    def run(measure: Callable[[], Any], *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(cli, "_measure_and_report", lambda *_: measure())
        return main(["bench", *arguments]), capsys.readouterr().err

    return run


def raising(error: BaseException) -> Callable[[], Any]:
    def measure() -> Any:
        raise error

    return measure


def world_without_ranks() -> RankWorld:
    return RankWorld(WorldSettings(world_size=0, workload=WorkloadSettings(model="mlp")))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Without it, a signal that the harness does not take would end pytest itself."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", SIGNALS)
def test_interrupts_after_the_first_leave_the_cleanup_alone(
    ended: Callable[..., tuple[int, str]], interruptible: None, first: signal.Signals
) -> None:
    cleaned = []

    def measure() -> None:
        try:
            signal.raise_signal(first)
        finally:
            for number in SIGNALS:
                signal.raise_signal(number)
            cleaned.append(True)

    assert ended(measure) == (130, f"bench: interrupted; {GONE}\n")
    assert cleaned
    assert {signal.getsignal(number) for number in SIGNALS} == {signal.default_int_handler}


def test_a_signal_that_was_ignored_still_is(ended: Callable[..., tuple[int, str]], interruptible: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    assert ended(lambda: signal.raise_signal(signal.SIGHUP) or 0) == (0, "")


def test_a_world_deletes_its_folder_though_interrupted_or_while_others_write_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rmtree, late, interrupts = shutil.rmtree, ["a process that was killed is not gone yet"], [signal.SIGINT]

    def disturbed(path: str, *arguments: Any, **others: Any) -> None:
        if interrupts:
            signal.raise_signal(interrupts.pop())
        if late:
            (Path(path) / "late").write_text(late.pop())
        else:
            rmtree(path, *arguments, **others)

    with pytest.raises(KeyboardInterrupt), world_without_ranks() as world:
        monkeypatch.setattr(shutil, "rmtree", disturbed)
    assert not late and not interrupts and not world.directory.exists()


def test_a_folder_that_cannot_be_deleted_is_named(
    ended: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree, world = shutil.rmtree, world_without_ranks()
    monkeypatch.setattr(rank_world, "DELETION_GRACE_S", 0.0)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)

    def measure() -> None:
        with world:
            raise KeyboardInterrupt

    status, said = ended(measure)
    assert status == 130
    assert (
        said == f"bench: interrupted; the temporary folder {world.directory} could not be deleted; delete it yourself\n"
    )
    rmtree(world.directory)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; free some space, or choose other"),
        (PermissionError(errno.EACCES, "Permission denied", "/there"), "Permission denied: '/there'; choose folders"),
        (OSError(errno.EROFS, "Read-only file system", "/there"), "Read-only file system: '/there'; choose folders"),
    ],
)
def test_what_the_machine_refuses_takes_one_line(
    ended: Callable[..., tuple[int, str]], tmp_path: Path, error: OSError, message: str
) -> None:
    status, said = ended(raising(error), "--output", str(tmp_path))
    assert status == 1 and said.count("\n") == 1
    assert message in said
    assert f"{tmp_path} (--output)" in said and "(TMPDIR)" in said


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "no such file", "x"), KeyError("x"), ValueError("x")]
)
def test_a_mistake_of_ours_shows_its_traceback(ended: Callable[..., tuple[int, str]], error: Exception) -> None:
    with pytest.raises(type(error)):
        ended(raising(error))


def test_a_place_for_the_results_is_looked_for_before_measuring(
    ended: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = raising(AssertionError("measured"))
    file = tmp_path / "file"
    file.touch()
    for output in (file, file / "below"):
        assert ended(measured, "--output", str(output)) == (
            2,
            f"bench: --output {output}: {file} is a file; pass a folder\n",
        )
    output = tmp_path / "new" / "folder"
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    assert ended(measured, "--output", str(output)) == (
        2,
        f"bench: --output {output}: {tmp_path} cannot be written to; pass another folder\n",
    )
    assert not output.parent.exists()
