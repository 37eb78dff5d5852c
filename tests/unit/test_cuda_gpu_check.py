"""The commands that check and time everything on a CUDA device: what they start, their limits, and what they leave."""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("gpu_check", "gpu_bench")
NO_FIGURES = {"device": "a pretended one"}


@pytest.fixture(autouse=True)
def benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def program(name: str) -> Any:
    return importlib.import_module(name)


def parts_of(name: str, folder: Path) -> list[Any]:
    found: list[Any] = program(name).parts("cuda", folder)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_limits_and_files_of_parts(name: str, tmp_path: Path) -> None:
    parts = parts_of(name, tmp_path)
    assert len({part.name for part in parts}) == len(parts) > 2
    for part in parts:
        assert part.limit_s < 8 * 60
        for argument in part.command:
            if argument.startswith(("tests/", "benchmarks/")):
                assert (ROOT / argument).exists(), argument


@pytest.mark.parametrize(("optional", "outcome"), [(True, "not run: no sanitizer"), (False, "FAILED: no sanitizer")])
def test_part_that_cannot_run(optional: bool, outcome: str, tmp_path: Path) -> None:
    """Its record says why, and replaces what an earlier run said of it."""
    gpu_parts = program("gpu_parts")
    part = gpu_parts.Part(name="memcheck", command=["true"], limit_s=4, starts=gpu_parts.Starts)
    about = {"device": "NVIDIA H100", "commit": "abc", "date": "2026-11-28", "versions": {"torch": "2.11.0"}}
    assert part.run(tmp_path / "check.json", about).startswith("passed")
    absent = dataclasses.replace(part, missing="no sanitizer", optional=optional, figures=gpu_parts.test_results)
    assert absent.run(tmp_path / "check.json", about) == outcome
    (row,) = gpu_parts.rows_of(tmp_path / "check.json")
    assert row == f"| NVIDIA H100: memcheck {outcome} | 2.11.0 | 0 | 0 | 0 | 2026-11-28, abc |"


def test_file_that_is_no_json(tmp_path: Path) -> None:
    gpu_parts = program("gpu_parts")
    (tmp_path / "check.json").write_text('{"library": {"outc')
    part = gpu_parts.Part(name="memcheck", command=["touch", str(tmp_path / "ran")], limit_s=4, starts=gpu_parts.Starts)
    with pytest.raises(ValueError, match="Unterminated string"):
        part.run(tmp_path / "check.json", NO_FIGURES)
    assert not (tmp_path / "ran").exists()


# It writes what it has, and then hangs, with a child, deaf to Ctrl-C.
HANGS = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
pathlib.Path(sys.argv[1]).write_text(f"case,us,child\\nfirst,12.5,{child.pid}\\n")
print("first is done", flush=True)
time.sleep(100)
"""


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_part_that_exceeds_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_parts = program("gpu_parts")
    monkeypatch.setattr(gpu_parts, "GRACE_S", 0.3)
    times = tmp_path / "times.csv"
    part = gpu_parts.Part(
        name="times",
        command=[sys.executable, "-c", HANGS, str(times)],
        limit_s=4,
        starts=gpu_parts.Starts,
        figures=lambda said: gpu_parts.read_rows(times, said),
    )
    assert part.run(tmp_path / "check.json", NO_FIGURES) == "FAILED: not done after 4 s"
    record = json.loads((tmp_path / "check.json").read_text())["times"]
    (row,) = record["figures"]
    assert (row["case"], row["us"], record["device"]) == ("first", "12.5", "a pretended one")
    assert record["last_lines"] == ["first is done"] and record["outcome"] == "FAILED: not done after 4 s"
    deadline = time.monotonic() + 30
    while is_running(row["child"]):  # a killed process may end a moment later
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_results_of_tests(tmp_path: Path) -> None:
    gpu_parts = program("gpu_parts")
    (tmp_path / "test_three.py").write_text(
        textwrap.dedent("""
            import pytest
            @pytest.mark.parametrize("name", ["all reduce", "b"])
            def test_passes(name): pass
            def test_fails(): assert False
            @pytest.mark.skip(reason="why not")
            def test_skipped(): pass
            @pytest.mark.skip
            def test_hangs(): pass
        """)
    )
    options = ["-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path), "-v"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    part = gpu_parts.Part(
        name="tests", command=command, limit_s=60, starts=gpu_parts.Starts, figures=gpu_parts.test_results
    )
    assert part.run(tmp_path / "check.json", NO_FIGURES).startswith("FAILED with status 1")
    figures = json.loads((tmp_path / "check.json").read_text())["tests"]["figures"]
    assert (figures["passed"], figures["skipped"], figures["not_ended"]) == (2, 2, [])
    assert [test.rpartition("/")[2] for test in figures["failed_tests"]] == ["test_three.py::test_fails"]
    said = (tmp_path / "tests.log").read_text()
    killed = gpu_parts.test_results(said[: said.index(" SKIPPED", said.index("test_hangs"))])
    assert killed["skipped"] == 1 and killed["not_ended"][0].endswith("test_three.py::test_hangs")


@pytest.mark.parametrize("name", PROGRAMS)
def test_unknown_part(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpu_parts, module = program("gpu_parts"), program(name)
    with pytest.raises(SystemExit) as ended:
        gpu_parts.main(name, "", module.parts, ["--device", "cpu", "--part", "tmes"])
    assert ended.value.code == 2
    refusal = capsys.readouterr().err
    assert "--part tmes: there is no such part; pass one of " in refusal
    assert all(part.name in refusal for part in parts_of(name, Path("anywhere")))


def test_no_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert program("gpu_parts").main("gpu-check", "", program("gpu_check").parts, []) == 2
    assert capsys.readouterr().err == ("gpu-check: torch sees no CUDA device; --dry-run and --device cpu need none\n")


@pytest.mark.long
def test_rehearsal_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command: what it runs imports no package that a borrowed machine may lack."""
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    for package in ("expecttest", "tlparse"):
        (lacking / f"{package}.py").write_text("raise ModuleNotFoundError('not on this machine')")
    monkeypatch.setenv("PYTHONPATH", str(lacking))
    words = ["--device", "cpu", "--part", "training_tests", "--output", str(tmp_path / "results")]
    before = signal.getsignal(signal.SIGTERM)
    try:
        # Tests that are all skipped have shown nothing.
        assert program("gpu_parts").main("gpu-check", "", program("gpu_check").parts, words) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    record = json.loads((tmp_path / "results" / "gpu_check.json").read_text())["training_tests"]
    assert record["outcome"] == "FAILED: no test ran, all were skipped"
    assert record["figures"]["skipped"] > 15 and record["figures"]["failed_tests"] == []
    assert {"python", "torch", "cuda"} <= set(record["versions"]) and record["device"] and record["commit"]


@pytest.mark.long
def test_rehearsal_on_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks train on a device that torch finds by an entry point, as vendors'; what needs CUDA is skipped."""
    entry_points = tmp_path / "pretend-1.dist-info" / "entry_points.txt"
    entry_points.parent.mkdir()
    entry_points.write_text("[torch.backends]\nacc = device:load\n")
    (entry_points.parent / "METADATA").write_text("Metadata-Version: 2.1\nName: pretend\nVersion: 1\n")
    folders = (tmp_path, ROOT / "tests" / "pretend_accelerator")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    words = ["--device", "cpu", "--part", "training_tests", "--output", str(tmp_path)]
    done = subprocess.run([sys.executable, "benchmarks/gpu_check.py", *words], cwd=ROOT, capture_output=True, text=True)
    record = json.loads((tmp_path / "gpu_check.json").read_text())["training_tests"]
    assert done.returncode == 0, done.stdout
    assert record["outcome"].startswith("passed") and record["figures"]["passed"] == 9


def print_row(file: Path) -> int:
    status: int = program("gpu_parts").main("gpu-check", "", program("gpu_check").parts, ["--row", str(file)])
    return status


def test_rows_of_a_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu_check.json"
    about = {"device": "NVIDIA H100", "commit": "abc", "date": "2026-11-28", "versions": {"torch": "2.11.0"}}
    passed = {"outcome": "passed in 70 s", **about}
    records = {
        "library": {**passed, "figures": None},
        "first_use": {**passed, "figures": {"first_call_s": [0.1]}},
        "kernel_tests": {**passed, "figures": {"passed": 31, "skipped": 2}},
        "memcheck": {**passed, "outcome": "FAILED with status 1", "figures": {"passed": 3, "failed": 4}},
        "times": {**passed, "commit": "later", "figures": [{"time": 1}]},
    }
    file.write_text(json.dumps(records))
    assert print_row(file) == 0
    assert capsys.readouterr().out == (
        "| NVIDIA H100: library, first_use, kernel_tests, memcheck FAILED with status 1 | 2.11.0 | 34 | 4 | 2 |"
        " 2026-11-28, abc |\n| NVIDIA H100: times | 2.11.0 | 0 | 0 | 0 | 2026-11-28, later |\n"
    )
    file.write_text('{"times": {"device": "NVIDIA H100"}}')
    with pytest.raises(SystemExit):
        print_row(file)
    assert "not a file that gpu_check.py has written (KeyError('versions'))" in capsys.readouterr().err
