"""Parts of a check or a benchmark on a GPU that may be there for minutes only.

Each part is a command with a time limit, and leaves its figures behind even if it is stopped: what it prints goes to
PART.log as it comes, and its record in one JSON of all parts has the outcome, the figures so far, the versions and the
device. Parts that run later add theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import datetime
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
# The package is used from the source tree: nothing needs to be installed.
sys.path.insert(0, str(ROOT))

#: Packages whose versions are written down.
PACKAGES = ("torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc", "pytest", "pytest-timeout", "hypothesis")
#: Time for a command to write what it has, after it has been told to stop.
GRACE_S = 10
#: No part may be longer, so that each fits into ten minutes; the grace is in addition.
LONGEST_S = 8 * 60
#: Lines of a part's output in its JSON.
TAIL_LINES = 60


#: Assumed seconds of what parts start; nobody has measured them on a GPU yet.
COSTS_S = {"processes": 8.0, "compilations": 40.0, "programs": 1.0, "tests": 0.5, "launches": 6e-6}
ASSUMED = (
    "assumed: {processes:g} s for a process to import torch and open the device, {compilations:g} s for inductor to"
    " compile a benchmark's model, {programs:g} s for NVRTC to compile a program, {tests:g} s a test, {launches:g} s a"
    " launch"
).format(**COSTS_S)


@dataclass(frozen=True, kw_only=True)
class Starts:
    """What a part starts, one after the other."""

    processes: int = 0  #: that import torch and open the device
    compilations: int = 0  #: of a model by inductor, without a cache
    programs: int = 0  #: of kernels, by NVRTC
    tests: int = 0
    launches: int = 0  #: of kernels
    other_s: float = 0.0  #: what is not in the costs of these

    @property
    def seconds(self) -> float:
        return self.other_s + sum(getattr(self, name) * cost for name, cost in COSTS_S.items())


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command.

    Args:
        name: As ``--part`` takes it; also that of its files.
        command: What runs.
        limit_s: Time limit in seconds.
        starts: What it starts, counted when asked for.
        environment: Variables in addition to those of this process.
        figures: Figures of a run that has ended or was stopped, from its output and from files that it has written.
        missing: What is missing, if the part cannot run without it.
        optional: Whether it may be missing.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    starts: Callable[[], Starts]
    environment: Mapping[str, str] = field(default_factory=dict)
    figures: Callable[[str], Any] = lambda said: None
    missing: str = ""
    optional: bool = False

    def run(self, results: Path, about: Mapping[str, Any]) -> str:
        """Run it, and put its record into the JSON. The outcome's first word is "passed", "FAILED" or "not"."""
        # Read first: a file that is no JSON ends the command before minutes on a device are spent.
        before = json.loads(results.read_text()) if results.exists() else {}
        start, log = time.monotonic(), results.with_name(f"{self.name}.log")
        log.write_bytes(b"")
        outcome, figures = "FAILED: stopped from outside", None
        try:
            outcome = self._outcome(log, start)
        finally:
            said = log.read_text(errors="replace")
            if not self.missing:
                figures = self.figures(said)
            if self.figures is test_results and outcome.startswith("passed") and not figures.get("passed"):
                outcome = "FAILED: no test ran, all were skipped"
            record = {
                **{"outcome": outcome, "seconds": round(time.monotonic() - start, 1), "limit_s": self.limit_s},
                **{"command": shlex.join(self.command), **about},
                **{"figures": figures, "last_lines": said.splitlines()[-TAIL_LINES:]},
            }
            # Renamed when it is whole: a run that is killed leaves no half of a JSON.
            whole = results.with_suffix(".new")
            whole.write_text(json.dumps({**before, self.name: record}, indent=1) + "\n")
            whole.replace(results)
        return outcome

    def _outcome(self, log: Path, start: float) -> str:
        if self.missing:
            return f"{'not run' if self.optional else 'FAILED'}: {self.missing}"
        print(f"\n== {self.name}, at most {self.limit_s:g} s: {shlex.join(self.command)}", flush=True)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **search_path(ROOT), **self.environment}
        options: Any = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        # In its own session, so that the command's children are stopped with it.
        process = subprocess.Popen(self.command, start_new_session=True, **options)
        with log.open("wb") as file:
            copier = threading.Thread(target=_copy, args=(process.stdout, (file, sys.stdout.buffer)), daemon=True)
            copier.start()
            try:
                status: int | None = process.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _stop(process)
                copier.join(GRACE_S)
        seconds = f"{time.monotonic() - start:.0f} s"
        if status is None:
            return f"FAILED: not done after {self.limit_s:g} s"
        return f"passed in {seconds}" if status == 0 else f"FAILED with status {status} in {seconds}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a command and its children: first as Ctrl-C does, which lets pytest and the benchmark say what they have."""
    for number, grace_s in ((signal.SIGINT, GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if process.poll() is None or number is signal.SIGKILL:
                os.killpg(process.pid, number)
            process.wait(grace_s)


def _copy(source: IO[bytes], sinks: Iterable[IO[bytes]]) -> None:
    while data := os.read(source.fileno(), 1 << 16):
        for sink in sinks:
            sink.write(data)
            sink.flush()


def test_results(said: str) -> dict[str, Any]:
    """How the tests ended that ``pytest -v`` has printed, and which one was running when it was stopped."""
    ended = dict(re.findall(r"^(\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", said, re.MULTILINE))
    begun = re.findall(r"^(\S+\.py::.+?)(?: (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b.*)?$", said, re.MULTILINE)
    counts = {word.lower(): list(ended.values()).count(word) for word in dict.fromkeys(ended.values())}
    failed = [test for test, word in ended.items() if word in ("FAILED", "ERROR")]
    return {**counts, "failed_tests": failed, "not_ended": [test for test in begun if test.strip() not in ended]}


def rows_of(path: Path) -> list[str]:
    """The rows of docs/compatibility.md for a JSON of parts, of whatever machine, version and commit they are.

    Raises:
        ValueError: The file is not such a JSON.
    """
    try:
        alike: dict[tuple[str, ...], dict[str, Any]] = {}
        for name, record in json.loads(path.read_text()).items():
            key = record["device"], record["versions"]["torch"], record["date"], record["commit"]
            alike.setdefault(key, {})[name] = record
        rows = []
        for (device, torch, date, commit), records in alike.items():
            parts = [
                name if record["outcome"].startswith("passed") else f"{name} {record['outcome']}"
                for name, record in records.items()
            ]
            figures = [record["figures"] for record in records.values() if isinstance(record["figures"], dict)]
            counts = [str(sum(each.get(word, 0) for each in figures)) for word in ("passed", "failed", "skipped")]
            rows.append(f"| {device}: {', '.join(parts)} | {torch} | {' | '.join(counts)} | {date}, {commit} |")
        return rows
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--row {path}: not a file that gpu_check.py has written ({error!r})") from None


def read_rows(path: Path, said: str) -> list[dict[str, str]]:
    """Rows of a CSV file that the part writes anew whenever there is more."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def without_packages(*packages: str) -> str:
    """Which of these cannot be imported, as a reason not to run; empty if all can."""
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"{' and '.join(absent)} cannot be imported" if absent else ""


def search_path(*folders: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])}


def provenance(device: str) -> dict[str, Any]:
    """Device and versions, for the record of every part."""
    import torch

    from ddp_compile.bench.provenance import commit, processor

    versions = {"python": platform.python_version(), "platform": platform.platform(), "cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    today = datetime.date.today().isoformat()
    about: dict[str, Any] = {"device": processor(), "versions": versions, "commit": commit(), "date": today}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        about["device"] = properties.name
        about["capability"] = f"sm_{properties.major}{properties.minor}"
        about["memory_gib"] = round(properties.total_memory / 2**30)
        if tool := shutil.which("nvidia-smi"):
            query = [tool, "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
            about["driver_and_clocks"] = subprocess.run(
                query, check=False, capture_output=True, text=True
            ).stdout.strip()
    return about


def folder_of(device_name: str) -> Path:
    """Where the results of a device go."""
    return ROOT / "benchmarks" / "results" / re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")


def print_estimate(parts: Sequence[Part]) -> None:
    """What the parts will start and how long that may take; nothing is started on a device."""
    print("part".ljust(20), *(name.rjust(12) for name in COSTS_S), "estimated s".rjust(12), "limit s".rjust(8))
    total = 0.0
    for part in parts:
        starts = part.starts()
        total += starts.seconds
        counts = [f"{getattr(starts, name):12,}" for name in COSTS_S]
        print(part.name.ljust(20), *counts, f"{starts.seconds:12.0f}", f"{part.limit_s:8g}", flush=True)
    print(f"together about {total:.0f} s, at most {sum(part.limit_s for part in parts):g} s\n{ASSUMED}")


def summarize(outcomes: Mapping[str, str]) -> int:
    """Print the result of each part; returns 1 if one failed, otherwise 0."""
    print("\nsummary")
    for name, outcome in outcomes.items():
        print(f"  {name}: {outcome}")
    return int(any(outcome.startswith("FAILED") for outcome in outcomes.values()))


def main(program: str, about: str, parts_of: Callable[[str, Path], list[Part]], words: Sequence[str] | None) -> int:
    """Run the parts that the command line names.

    Args:
        program: The command's name.
        about: Its description.
        parts_of: All parts in order, for a kind of device and a folder for their results.
        words: The command line; that of this process if None.
    """
    listed = "; ".join(f"{part.name} ({part.limit_s:g} s)" for part in parts_of("cuda", Path("RESULTS")))
    parser = argparse.ArgumentParser(program, description=about, epilog=f"parts, with their time limits: {listed}")
    parser.add_argument("--part", action="append", metavar="NAME", help="run this part alone; can be repeated")
    parser.add_argument("--output", type=Path, help="folder for the results (default: benchmarks/results/DEVICE)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and how long it may take")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="time limit of each part instead of its own")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal without a GPU")
    parser.add_argument("--row", type=Path, metavar="FILE", help="print such a JSON as a row of docs/compatibility.md")
    arguments = parser.parse_args(words)
    if arguments.row is not None:
        try:
            print(*rows_of(arguments.row), sep="\n")
        except ValueError as error:
            parser.error(str(error))
        return 0
    if missing := without_packages("torch"):
        print(f"{program}: {missing}", file=sys.stderr)
        return 2
    import torch

    if arguments.device == "cuda" and not arguments.dry_run and not torch.cuda.is_available():
        print(f"{program}: torch sees no CUDA device; --dry-run and --device cpu need none", file=sys.stderr)
        return 2
    where = {} if arguments.dry_run else provenance(arguments.device)
    folder = (arguments.output or folder_of(where.get("device", "none"))).absolute()
    parts = parts_of(arguments.device, folder)
    known = [part.name for part in parts]
    if unknown := [name for name in arguments.part or () if name not in known]:
        parser.error(f"--part {unknown[0]}: there is no such part; pass one of {', '.join(known)}")
    chosen = [part for part in parts if part.name in (arguments.part or known)]
    if arguments.dry_run:
        print_estimate(chosen)
        return 0
    if arguments.limit is not None:
        chosen = [dataclasses.replace(part, limit_s=arguments.limit) for part in chosen]
    print(json.dumps(where, indent=1))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a part's files are written then too
    results = folder / f"{program.replace('-', '_')}.json"
    return summarize({part.name: part.run(results, where) for part in chosen})
