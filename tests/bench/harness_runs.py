"""Runs of the benchmark with a tiny model, and their results."""

import os
import subprocess
import sys
import time
from pathlib import Path

from ddp_compile.bench.link import unavailable_reason

HERE = Path(__file__).parent
# Each case of each rank has its own compile cache. A precompiled header takes longer than a tiny kernel, and so does
# the test for the compiler's vector instructions.
QUICK_COMPILES = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
ENVIRONMENT = {**os.environ, **QUICK_COMPILES}


BENCH = ["bench", "--model", "bench_entries:tiny"]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_compile", *BENCH, *arguments],
        cwd=HERE,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as in a terminal of its own, where a Ctrl-C reaches the whole process group
    )


def left_behind(pid: int) -> list[str]:
    """Namespaces and processes of the run that this process directed, after a moment in which they may still end."""
    deadline = time.monotonic() + 3
    while (found := namespaces_of(pid) + processes_of(pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def namespaces_of(pid: int) -> list[str]:
    if unavailable_reason() is not None:
        return []
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(line.split()[0] for line in listed if line.startswith(f"ddpbench-{pid}-"))


def processes_of(pid: int) -> list[str]:
    """Rank processes whose environment names the run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"DDP_COMPILE_BENCH_PID={pid}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found
