"""Runs of the benchmark that end early: their messages, and that they leave nothing behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from harness_runs import BENCH, ENVIRONMENT, HERE, left_behind, namespaces_of, processes_of, start

from ddp_compile.__main__ import main
from ddp_compile.bench.link import unavailable_reason


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
