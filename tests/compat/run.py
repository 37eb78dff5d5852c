"""Runs tests with the torch of this interpreter, and writes their rows into the table of docs/compatibility.md.

``make compat TORCH=2.15.0`` makes an environment for that torch and runs this with its interpreter; arguments are
passed on to pytest. The first row is of the tests of CI, except those with inductor, those that must run alone, and
those of packages and examples; the others are of what stands for a GPU where there is none.
"""

import datetime
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
LEFT_OUT = ("packaging", "examples")
SELECTIONS = {
    "CPUs, gloo": ("-m", "not inductor and not long and not alone", *(f"--ignore=tests/{f}" for f in LEFT_OUT)),
    "pretend accelerator": ("-m", "not alone", "tests/pretend_accelerator"),
    "PTX of the CUDA kernels, interpreted": ("-m", "", "tests/kernels/test_cuda_ptx.py"),
}  # fmt: skip
OUTCOMES = ("passed", "failed", "skipped")
HEAD = "| where | torch | passed | failed | skipped | when, commit |"


def count_outcomes(report: Path) -> Counter[str]:
    """Outcomes of the tests, from the file that pytest's ``--junit-xml`` has written."""
    counts: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        ends = {child.tag for child in case}
        counts["failed" if ends & {"failure", "error"} else "skipped" if "skipped" in ends else "passed"] += 1
    return counts


def with_row(page: str, where: str, torch_version: str, rest: str) -> str:
    """The page with this row in place of one of the same first two columns, or as the last one."""
    before, head, after = page.partition(f"{HEAD}\n")
    assert head, f"{PAGE} has no table {HEAD}"
    lines = after.splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("|"))
    key, rows = f"| {where} | {torch_version} |", lines[1:end]
    place = next((i for i, row in enumerate(rows) if row.startswith(key)), len(rows))
    rows[place : place + 1] = [f"{key} {rest} |"]
    return "\n".join([before + head + lines[0], *rows, *lines[end:]]) + "\n"


def main() -> int:
    import torch

    from ddp_compile.bench.provenance import commit

    status = 0
    for where, selection in SELECTIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", *selection, f"--junit-xml={report}", *sys.argv[1:]]
            status = subprocess.run(command, cwd=ROOT).returncode or status
            if not report.exists():
                continue
            counts, today = count_outcomes(report), datetime.date.today().isoformat()
            if not counts["passed"] + counts["failed"]:
                continue  # the pretend accelerator is written for one torch
            rest = " | ".join([*(str(counts[outcome]) for outcome in OUTCOMES), f"{today}, {commit()}"])
            PAGE.write_text(with_row(PAGE.read_text(), where, re.sub(r"\+cpu$", "", torch.__version__), rest))
            print(f"torch {torch.__version__}, {where}: {rest}")
    return status


if __name__ == "__main__":
    sys.exit(main())
