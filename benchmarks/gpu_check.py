"""All checks that need a CUDA device, without a network: ``make gpu-check``.

The C++ library is built, the GPU tests run, some of them again under compute-sanitizer, and the kernels are timed. A
part that cannot run says so and counts as failed, except for compute-sanitizer, which is optional.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu_parts import COSTS_S, ROOT, Part, Starts, main, read_rows, search_path, test_results, without_packages

# Every allocation goes to the driver, so that compute-sanitizer knows where each one ends.
NO_CACHING = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

# With the time that NVRTC takes.
FIRST_USE = """
import sys, time, torch
device = sys.argv[1]
tensors, flat = [torch.ones(9, device=device)], torch.zeros(9, dtype=torch.bfloat16, device=device)
from ddp_compile import kernels
start = time.perf_counter()
kernels.flatten_scale(tensors, flat, 0.5)
torch.accelerator.synchronize() if device != "cpu" else None
found = next(row.reason for row in kernels.status() if row.device_type == device)
print(f"first flatten_scale: {time.perf_counter() - start:.3f} s ({found})")
"""
KERNEL_TESTS = ("tests/gpu/test_kernels_memory.py", "tests/gpu/test_kernels_cuda.py")
TRAINING_TESTS = (
    "tests/gpu/test_two_ranks_on_one_gpu.py",
    "tests/gpu/test_launching_in_backward_cuda.py",
    "tests/gpu/test_sync_batch_norm.py",
)
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "-v", "-rs", "--durations=15"]


def count_tests(*arguments: str) -> int:
    """Number of tests that pytest would run with these arguments."""
    command = [*PYTEST[:-3], "-q", "--collect-only", *arguments]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **search_path(ROOT)})
    if listed.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {listed.returncode}:\n{listed.stdout[-2000:]}")
    return listed.stdout.count("::")


def first_uses(said: str) -> dict[str, Any]:
    return {"first_call_s": [float(s) for s in re.findall(r"first flatten_scale: ([\d.]+) s", said)]}


def timing_starts(device: str) -> Starts:
    import bench_kernels

    estimates = [bench_kernels.estimate(case, device) for case in bench_kernels.CASES[device]]
    launches, seconds = sum(each.launches for each in estimates), sum(each.seconds for each in estimates)
    # Launches are part of these seconds.
    return Starts(processes=1, programs=3, launches=launches, other_s=seconds - launches * COSTS_S["launches"])


def parts(device: str, folder: Path) -> list[Part]:
    """All parts in order, for "cuda" or, as a rehearsal, "cpu"."""
    python = sys.executable
    no_pytest = without_packages("pytest", "pytest_timeout")
    toolkits = [os.environ.get("PATH", ""), str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin")]
    sanitizer = shutil.which("compute-sanitizer", path=os.pathsep.join(toolkits))

    def tests(name: str, limit_s: int, starts: Starts, *arguments: str) -> Part:
        def counted() -> Starts:
            return replace(starts, tests=count_tests(*arguments))

        command = [*PYTEST, f"--timeout={limit_s // 2}", *arguments]
        return Part(
            name=name, command=command, limit_s=limit_s, starts=counted, figures=test_results, missing=no_pytest
        )

    def sanitized(tool: str, chosen: str, limit_s: int) -> Part:
        part = tests(
            tool, limit_s, Starts(processes=2, programs=9, other_s=limit_s / 4), "-x", KERNEL_TESTS[0], "-k", chosen
        )
        options = ["--error-exitcode", "99", "--target-processes", "all"]
        if tool == "memcheck":
            options += ["--report-api-errors", "no"]  # torch queries features that a driver may lack
        command = [sanitizer or "compute-sanitizer", "--tool", tool, *options, *part.command]
        missing = no_pytest if sanitizer else "compute-sanitizer is not installed"
        return replace(part, command=command, environment=NO_CACHING, missing=missing, optional=not sanitizer)

    times = folder / "times.csv"
    timing = [python, "benchmarks/bench_kernels.py", "--device", device, "--output", str(times)]
    return [
        Part(
            name="library",
            command=[python, "setup.py", "-q", "build_ext", "--inplace"],
            limit_s=120,
            starts=lambda: Starts(processes=1, other_s=40),
            environment={"DDP_COMPILE_NATIVE": "1"},
            missing="" if shutil.which("c++") else "no C++ compiler",
        ),
        Part(
            name="first_use",
            command=[python, "-c", FIRST_USE, device],
            limit_s=60,
            starts=lambda: Starts(processes=1, programs=1),
            figures=first_uses,
        ),
        tests("kernel_tests", 150, Starts(processes=1, programs=12), *KERNEL_TESTS),
        # A pair of ranks on the device, one on the CPU and one for SyncBatchNorm, and twelve small models compiled by
        # inductor at ten seconds.
        tests("training_tests", 400, Starts(processes=4, other_s=120), *TRAINING_TESTS),
        sanitized("memcheck", "", 120),
        sanitized("racecheck", "codec and dtype0", 90),
        Part(
            name="times",
            command=[*timing, *(() if device == "cuda" else ("--rounds", "2"))],
            limit_s=150,
            starts=partial(timing_starts, device),
            figures=partial(read_rows, times),
            missing=without_packages("tabulate"),
        ),
    ]


if __name__ == "__main__":
    sys.exit(main("gpu-check", __doc__ or "", parts, sys.argv[1:]))
