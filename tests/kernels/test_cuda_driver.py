"""Launching through cuda.bindings itself, which finds a stand-in for the driver: handles, contexts, capture modes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed")
def test_driver_calls(tmp_path: Path) -> None:
    libcuda = tmp_path / "libcuda.so.1"
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "the tests need a C compiler"
    flags = ["-shared", "-fPIC", "-Wall", "-Wno-pedantic"]
    subprocess.run([compiler, *flags, HERE / "fake_cuda_driver.c", "-o", libcuda, "-ldl"], check=True)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE), *filter(None, sys.path)]),
    }
    command = [sys.executable, HERE / "cuda_driver_checks.py", libcuda, tmp_path]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and "all checks passed" in result.stdout, result.stderr
