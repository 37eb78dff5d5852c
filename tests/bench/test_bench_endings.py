"""How runs end: cleanup that an interrupt must not stop, last messages, and refusals at the start."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_compile.__main__ import main
from ddp_compile.bench import cli

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
