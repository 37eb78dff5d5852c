"""The command that checks everything on a CUDA device: its parts fit into its time limit, and name files that exist."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_all_parts_together_fit_into_nine_minutes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "benchmarks" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    gpu_check = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = gpu_check
    spec.loader.exec_module(gpu_check)
    parts = gpu_check.parts("NVIDIA H200", tmp_path, None)
    assert sum(part.limit_s for part in parts) < 9 * 60
    assert str(ROOT / "benchmarks" / "results" / "kernels_nvidia_h200.csv") in parts[-1].command
    for part in parts:
        for argument in part.command:
            if argument.startswith(("tests/", "benchmarks/")):
                assert (ROOT / argument).exists(), argument
