"""All checks of the kernels that need a CUDA device, in one command without a network: ``make gpu-check``.

The C++ library is built, the GPU tests run, some of them again under compute-sanitizer, and the kernels are timed. Each
part has its own time limit; in total they are below nine minutes. A part that cannot run says so and counts as failed,
except for compute-sanitizer, which is optional.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Packages whose versions are printed.
PACKAGES = ("torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc", "pytest", "pytest-timeout", "hypothesis")

# Every allocation goes to the driver, so that compute-sanitizer knows where each one ends.
NO_CACHING = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

FIRST_USE = """
import time, torch
torch.zeros(1, device="cuda")
tensors, flat = [torch.ones(9, device="cuda")], torch.zeros(9, dtype=torch.bfloat16, device="cuda")
from ddp_compile import kernels
start = time.perf_counter()
kernels.flatten_scale(tensors, flat, 0.5, with_stats=True, implementation="cuda")
torch.cuda.synchronize()
print(f"first flatten_scale: {time.perf_counter() - start:.3f} s ({kernels.status()[-1].reason})")
"""


@dataclass(frozen=True)
class Part:
    """One step of the check.

    Args:
        name: For the summary.
        command: What runs.
        limit_s: Time limit in seconds.
        environment: Variables in addition to those of this process.
        missing: What is missing, if the part cannot run without it.
        optional: Whether it may be missing.
    """

    name: str
    command: Sequence[str]
    limit_s: int
    environment: dict[str, str]
    missing: str = ""
    optional: bool = False

    def run(self) -> str:
        """The part's result for the summary. If it succeeded, the first word is "passed"."""
        if self.missing:
            return f"{'not run' if self.optional else 'FAILED'}: {self.missing}"
        print(f"\n== {self.name}: {' '.join(self.command)}", flush=True)
        start = time.monotonic()
        environment = {**os.environ, **self.environment}
        # In its own session, so that the command's children are stopped with it.
        process = subprocess.Popen(self.command, cwd=ROOT, env=environment, start_new_session=True)
        try:
            status = process.wait(self.limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return f"FAILED: not done after {self.limit_s} s"
            raise
        seconds = f"{time.monotonic() - start:.0f} s"
        return f"passed in {seconds}" if status == 0 else f"FAILED with status {status} in {seconds}"


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def print_versions() -> None:
    import torch

    print(f"python {platform.python_version()}, {platform.platform()}")
    for package in PACKAGES:
        print(f"{package} {version_of(package)}")
    properties = torch.cuda.get_device_properties(0)
    memory_gib = properties.total_memory / 2**30
    print(
        f"{properties.name}, sm_{properties.major}{properties.minor}, {memory_gib:.0f} GiB, CUDA {torch.version.cuda}"
    )
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv"]
        subprocess.run(query, check=False)
    subprocess.run(["git", "-C", str(ROOT), "log", "-1", "--format=commit %H"], check=False)


def without_packages(*packages: str) -> str:
    """Which of these cannot be imported, as a reason not to run; empty if all can."""
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"{' and '.join(absent)} cannot be imported" if absent else ""


def parts(device_name: str, cache: Path, output: Path | None) -> list[Part]:
    """All parts in order. Their limits add up to less than nine minutes."""
    python = sys.executable
    pytest = [python, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu"]
    paths = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "DDP_COMPILE_CACHE_DIR": str(cache),
    }
    no_pytest = without_packages("pytest", "pytest_timeout")
    toolkits = [os.environ.get("PATH", ""), str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin")]
    sanitizer = shutil.which("compute-sanitizer", path=os.pathsep.join(toolkits))
    file_name = f"kernels_{re.sub(r'[^a-z0-9]+', '_', device_name.lower()).strip('_')}.csv"
    results = output or ROOT / "benchmarks" / "results" / file_name

    def sanitized(tool: str, tests: str, limit_s: int) -> Part:
        missing = no_pytest if sanitizer else "compute-sanitizer is not installed"
        options = ["--error-exitcode", "99", "--target-processes", "all"]
        if tool == "memcheck":
            options += ["--report-api-errors", "no"]  # torch queries features that a driver may lack
        tests_of_it = [*pytest, "-x", "tests/gpu/test_kernels_memory.py", "-k", tests]
        command = [sanitizer or "", "--tool", tool, *options, *tests_of_it]
        return Part(f"compute-sanitizer {tool}", command, limit_s, {**paths, **NO_CACHING}, missing, not sanitizer)

    native = {**paths, "DDP_COMPILE_NATIVE": "1"}
    no_compiler = "" if shutil.which("c++") else "no C++ compiler"
    return [
        Part("C++ library", [python, "setup.py", "-q", "build_ext", "--inplace"], 60, native, no_compiler),
        Part("first use, compiled", [python, "-c", FIRST_USE], 30, paths),
        Part("first use, from the cache", [python, "-c", FIRST_USE], 30, paths),
        Part("GPU tests", [*pytest, "tests/gpu", "-rs"], 150, paths, no_pytest),
        sanitized("memcheck", "", 90),
        sanitized("racecheck", "number or (codec and dtype0)", 60),
        Part(
            "times",
            [python, "benchmarks/bench_kernels.py", "--device", "cuda", "--output", str(results)],
            110,
            paths,
            without_packages("tabulate"),
        ),
    ]


def summarize(outcomes: dict[str, str], print_line: Callable[[str], None] = print) -> int:
    """Print the result of each part; returns 1 if one failed, otherwise 0."""
    print_line("\nsummary")
    for name, outcome in outcomes.items():
        print_line(f"  {name}: {outcome}")
    return int(any(outcome.startswith("FAILED") for outcome in outcomes.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="CSV of the times (default: benchmarks/results/kernels_DEVICE.csv)")
    arguments = parser.parse_args()
    if missing := without_packages("torch"):
        print(f"gpu-check: {missing}", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device", file=sys.stderr)
        return 2
    print_versions()
    # Empty, so that everything is compiled by this machine's NVRTC.
    with tempfile.TemporaryDirectory() as cache:
        checks = parts(torch.cuda.get_device_name(), Path(cache), arguments.output)
        return summarize({part.name: part.run() for part in checks})


if __name__ == "__main__":
    sys.exit(main())
