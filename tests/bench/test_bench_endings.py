"""How runs end: cleanup that an interrupt must not stop, messages, refusals at the start, and nothing left behind."""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness_runs import BENCH, ENVIRONMENT, HERE, left_behind, namespaces_of, processes_of, start

from ddp_compile.__main__ import main
from ddp_compile.bench import cli
from ddp_compile.bench.link import unavailable_reason

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


@pytest.mark.long
def test_a_rank_that_dies_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(HERE)
    status = main([*BENCH, "--implementations", "bench_entries:dies", "--only-steps", "--output", str(tmp_path)])
    errors = capfd.readouterr().err
    assert status == 1
    assert "rank 1 of bench_entries:dies" in errors and "exit code 7" in errors
    assert "the last words of rank 1" in errors
    assert left_behind(os.getpid()) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_cleans_up_though_it_is_repeated(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, temporary = tmp_path / "started", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setitem(ENVIRONMENT, "STARTED_FILE", str(started))
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(temporary))
    process = start("--implementations", "bench_entries:hangs", "--only-steps", "--output", str(tmp_path))
    deadline = time.monotonic() + 120
    while not started.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(process.pid)
    assert namespaces_of(process.pid) or unavailable_reason() is not None
    assert list(temporary.glob("ddp_compile_bench_*"))
    os.killpg(process.pid, number)
    time.sleep(0.005)
    os.killpg(process.pid, number)  # in the middle of the cleanup
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; all processes, namespaces and temporary files of the run are gone" in errors
    assert "Traceback" not in errors
    assert left_behind(process.pid) == []
    assert list(temporary.glob("ddp_compile_bench_*")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--implementations", "ddp"], "implementation 'ddp' is not known; pass one of local, ddp-eager"),
        (["--implementations", "nowhere:f"], "implementation 'nowhere:f' cannot be imported"),
        (["--model", "resnet"], "model 'resnet' is not known; pass one of mlp, gpt-small"),
        (["--modes", "fast"], "mode 'fast' is not known; pass some of default"),
        (["--link", "fast"], "mbit"),
        (["--rounds", "0"], "0 must be a whole number, at least 1"),
        (["--bucket-cap-mb", "0"], "--bucket-cap-mb: 0 must be a positive number"),
        (["--bucket-cap-mb", "x"], "--bucket-cap-mb: x must be a positive number"),
        (["--clip", "-1"], "--clip: -1 must be a positive number"),
        (["--tokens", "--model", "mlp"], "--model mlp is none; pass --model gpt-small or gpt-medium"),
        (["--implementations", ""], "name at least one"),
        (["--device", "cuda"], "torch sees no CUDA device"),
        (["--link", "simulated:none"], "simulated:none: a simulated link has a rate"),
        (["--link", "simulated:1gbit,none"], "--link simulated:1gbit,none has simulated rates and others"),
        (
            ["--link", "simulated:1gbit", "--ranks", "2"],
            "a simulated link has one real rank; set the number of pretended ranks with --simulated-ranks",
        ),
    ],
)
def test_bad_input_lists_what_is_known(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    try:
        status = main(["bench", *arguments])
    except SystemExit as ended:  # argparse's own way
        status = ended.code
    assert status == 2
    assert message in capsys.readouterr().err
