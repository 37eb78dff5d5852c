"""The provenance of results: the source tree's commit, the machine's processor."""

import platform
import subprocess
from pathlib import Path


def commit() -> str:
    """Commit of the source tree, with a plus sign if its sources have been changed; "unknown" outside one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        sources = ("ddp_compile", "passes", "runtime", "kernels")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", *sources) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # no git, or git does not trust the folder's owner


def processor() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
