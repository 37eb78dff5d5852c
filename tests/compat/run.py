"""Runs the tests that another version of torch has to pass, and prints its row for docs/compatibility.md.

``make compat TORCH=2.15.0`` makes an environment for that torch and runs this with its interpreter; arguments are
passed on to pytest. It runs the tests of CI, except those with inductor, those that must run alone, and those of
packages and examples.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SELECTION = ("-m", "not inductor and not long and not alone", "--ignore=tests/packaging", "--ignore=tests/examples")
OUTCOMES = ("passed", "failed", "skipped")


def count_outcomes(report: Path) -> dict[str, Counter[str]]:
    """Outcomes of the tests of each folder below tests/, from the file that pytest's ``--junit-xml`` has written."""
    counts: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        ends = {child.tag for child in case}
        outcome = "failed" if ends & {"failure", "error"} else "skipped" if "skipped" in ends else "passed"
        # "tests.unit.test_config"; pytest gives a file that cannot be collected by its path.
        folder = case.get("classname", "").split(".")[1:2] or ["collection"]
        counts.setdefault(folder[0], Counter())[outcome] += 1
    return counts


def format_summary(counts: dict[str, Counter[str]], torch_version: str) -> str:
    """A line for each folder, and the row for docs/compatibility.md."""
    lines = [f"{folder}: {_format_counts(counts[folder])}" for folder in sorted(counts)]
    total = sum(counts.values(), Counter())
    row = " | ".join([torch_version, *(str(total[outcome]) for outcome in OUTCOMES)])
    return "\n".join([*lines, f"torch {torch_version}: {_format_counts(total)}", f"| {row} |"])


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)


def main() -> int:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *SELECTION, f"--junit-xml={report}", *sys.argv[1:]]
        status = subprocess.run(command, cwd=ROOT).returncode
        if report.exists():
            print(format_summary(count_outcomes(report), torch.__version__))
    return status


if __name__ == "__main__":
    sys.exit(main())
