"""The command that checks everything on a CUDA device: what it makes of failures, time limits and missing parts."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "benchmarks" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_each_outcome_has_its_word_and_failures_their_status(gpu_check: ModuleType) -> None:
    part = gpu_check.Part
    outcomes = {
        "good": part("good", python("pass"), 30, {}).run(),
        "bad": part("bad", python("raise SystemExit(3)"), 30, {}).run(),
        "absent": part("absent", ["no such command"], 30, {}, "x is not installed").run(),
        "unneeded": part("unneeded", ["no such command"], 30, {}, "y is not installed", optional=True).run(),
        "told": part("told", python("import os; raise SystemExit(os.environ['X'] != '1')"), 30, {"X": "1"}).run(),
    }
    assert outcomes["good"].startswith("passed in") and outcomes["told"].startswith("passed in")
    assert outcomes["bad"].startswith("FAILED with status 3")
    assert outcomes["absent"] == "FAILED: x is not installed"
    assert outcomes["unneeded"] == "not run: y is not installed"
    lines: list[str] = []
    assert gpu_check.summarize(outcomes, lines.append) == 1
    assert lines[1:] == [f"  {name}: {outcome}" for name, outcome in outcomes.items()]
    assert gpu_check.summarize({"good": outcomes["good"], "unneeded": outcomes["unneeded"]}, lines.append) == 0


def test_a_part_that_takes_too_long_is_stopped_with_what_it_started(gpu_check: ModuleType, tmp_path: Path) -> None:
    program = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"path = pathlib.Path({str(tmp_path)!r})\n"
        "(path / 'part').write_text(str(child.pid))\n"
        "(path / 'part').rename(path / 'child')\n"
        "time.sleep(60)\n"
    )
    assert gpu_check.Part("slow", python(program), 2, {}).run() == "FAILED: not done after 2 s"
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        status = Path(f"/proc/{child}/stat")
        # Gone, or dead and waiting for whoever takes its status.
        if not status.exists() or status.read_text().split(")")[1].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        pytest.fail("what the part had started went on")


def test_all_parts_together_fit_into_nine_minutes(gpu_check: ModuleType, tmp_path: Path) -> None:
    parts = gpu_check.parts("NVIDIA H200", tmp_path, None)
    assert sum(part.limit_s for part in parts) < 9 * 60
    assert str(ROOT / "benchmarks" / "results" / "kernels_nvidia_h200.csv") in parts[-1].command
    for part in parts:
        for argument in part.command:
            if argument.startswith(("tests/", "benchmarks/")):
                assert (ROOT / argument).exists(), argument
