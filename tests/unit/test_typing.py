"""Type checkers in strict mode take README's calls, and refuse typos in them.

`make lint` and `make pyright` say so with the project's settings.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS = Path("tests") / "typing" / "readme_calls.py"


@pytest.mark.long
@pytest.mark.slow
def test_mypy_takes_the_calls_of_the_readme_in_strict_mode(tmp_path: Path) -> None:
    # torch's own functions without types, Tensor.backward for example, are not ours to annotate.
    settings = ["--strict", "--config-file=", "--untyped-calls-exclude=torch", f"--cache-dir={tmp_path}"]
    command = [sys.executable, "-m", "mypy", *settings, "--follow-imports=silent", str(CALLS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
