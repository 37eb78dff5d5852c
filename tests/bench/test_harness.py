"""Whole runs of the harness: what it measures, what it does about failures, and that it leaves nothing behind."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import bench_entries
import pytest

from ddp_compile.__main__ import main
from ddp_compile.bench.link import Rate, unavailable_reason
from ddp_compile.bench.links import SimulatedLink
from ddp_compile.bench.rank_world import RankWorld, WorldSettings
from ddp_compile.bench.report import PROVENANCE_COLUMNS, RUN_COLUMNS
from ddp_compile.bench.results import SUMMARY_COLUMNS
from ddp_compile.bench.run import BenchmarkRun, RunSettings
from ddp_compile.bench.settings import Case, WorkloadSettings

pytestmark = pytest.mark.alone
needs_links = pytest.mark.skipif(unavailable_reason() is not None, reason=f"no real links: {unavailable_reason()}")

HERE = Path(__file__).parent
# Each case of each rank has a compile cache of its own. A precompiled header takes longer than a tiny kernel, and so
# does finding out which vector instructions the compiler knows.
ENVIRONMENT = {**os.environ, "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", "TORCHINDUCTOR_VEC_ISA_OK": "0"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ddp_compile", "bench", "--model", "bench_entries:tiny", *arguments]


class Done(NamedTuple):
    """A run that has ended."""

    pid: int
    returncode: int
    stdout: str
    stderr: str


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        cwd=HERE,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as in a terminal of its own, where a Ctrl-C reaches the whole process group
    )


def bench(*arguments: str) -> Done:
    process = start(*arguments)
    output, errors = process.communicate(timeout=240)
    return Done(process.pid, process.returncode, output, errors)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def left_behind(pid: int) -> list[str]:
    """Namespaces and processes of the run that this process directed, after a moment in which they may still go."""
    deadline = time.monotonic() + 3
    while (found := namespaces_of(pid) + processes_of(pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def namespaces_of(pid: int) -> list[str]:
    if unavailable_reason() is not None:
        return []
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if name.startswith(f"ddpbench-{pid}-")]


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


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    output = tmp_path_factory.mktemp("run")
    implementations = ",".join(f"bench_entries:{name}" for name in ("delayed", "replicated", "fails_later"))
    done = bench(
        *("--implementations", f"{implementations},bench_entries:fails_at_once,ddp-eager", "--rounds", "4"),
        *("--link", "1gbit,none", "--bucket-cap-mb", "0.25", "--output", str(output)),
    )
    assert done.returncode == 0, done.stderr
    return done, output


def row(measured: tuple[Done, Path], implementation: str, link: str | None = None) -> dict[str, str]:
    found = [r for r in rows_of(measured[1] / "summary.csv") if r["implementation"] == implementation]
    return found[0] if link is None else next(r for r in found if r["link"] == link)


def test_a_known_delay_is_measured(measured: tuple[Done, Path]) -> None:
    for link in {r["link"] for r in rows_of(measured[1] / "summary.csv")}:
        plain = row(measured, "local", link)
        delayed = row(measured, "bench_entries:delayed", link)
        for column in ("step_ms", "forward_ms"):  # that is where it lies
            delay_s = (float(delayed[column]) - float(plain[column])) / 1000
            # What the machine does beside may take from either median.
            assert delay_s == pytest.approx(bench_entries.DELAY_S, rel=0.15)
        assert float(delayed["cpu_ms"]) < 1000 * bench_entries.DELAY_S  # sleeping takes no processor time


def test_columns_and_counts(measured: tuple[Done, Path]) -> None:
    rows = rows_of(measured[1] / "summary.csv")
    assert list(rows[0]) == [*RUN_COLUMNS, *SUMMARY_COLUMNS, *PROVENANCE_COLUMNS]
    gradient_mib = 4 * 2 * 256 * 256 / 2**20
    ours = row(measured, "bench_entries:replicated")
    assert ours["all_reduces"] == "2"  # a bucket of 0.25 MiB for each layer
    assert float(ours["payload_mib"]) == pytest.approx(gradient_mib, rel=1e-3)
    assert ours["num_steps"] == "8"
    # Parameters, the flat buffers that the gradients are views of, and a little for the batches and activations.
    assert 2 * gradient_mib < float(ours["peak_mib"]) < 4 * gradient_mib
    assert float(ours["loss"]) == pytest.approx(float(row(measured, "ddp-eager")["loss"]), rel=1e-6)
    assert row(measured, "local")["all_reduces"] == "0"
    assert row(measured, "local")["graphs"] == "1"
    for name in PROVENANCE_COLUMNS:
        assert ours[name]


def test_shown_percentages_and_bounds_come_from_the_same_run(measured: tuple[Done, Path]) -> None:
    ours, best = row(measured, "bench_entries:replicated"), row(measured, "ddp-eager")
    assert float(best["ratio_to_best_peer"]) == 1.0
    assert float(ours["ratio_low"]) <= float(ours["ratio_to_best_peer"]) <= float(ours["ratio_high"])
    local = row(measured, "local")
    assert best["exposed_ms"] == ""  # eager, so its computation is another one
    exposed = float(ours["step_ms"]) - float(local["step_ms"])
    assert float(ours["exposed_ms"]) == pytest.approx(exposed, abs=1e-3 * float(ours["step_ms"]))
    assert float(ours["bound_ms"]) >= float(local["step_ms"]) * 0.999


@needs_links
def test_links_have_their_rates_and_count_what_is_sent(measured: tuple[Done, Path]) -> None:
    slow, unshaped = (row(measured, "bench_entries:replicated", link) for link in ("1gbit", "none"))
    # No more than the link lets through. How much of that gloo reaches is the machine's; `test_link` asks for the rate.
    assert 0 < float(slow["achieved_gbit"]) < 1.15
    assert float(unshaped["achieved_gbit"]) > float(slow["achieved_gbit"])
    # Each of two ranks sends half of the sum and half of the result, and headers.
    assert float(slow["sent_mib"]) == pytest.approx(float(slow["payload_mib"]), rel=0.15)
    assert float(slow["step_ms"]) > float(unshaped["step_ms"])


def test_failing_implementations_stay_in_the_table(measured: tuple[Done, Path]) -> None:
    done, output = measured
    for name, message in (
        ("fails_at_once", "RuntimeError: this implementation cannot be built"),
        ("fails_later", "RuntimeError: this implementation breaks down"),
    ):
        for found in (r for r in rows_of(output / "summary.csv") if r["implementation"] == f"bench_entries:{name}"):
            assert (found["status"], found["error"], found["step_ms"]) == ("failed", message, "")
        assert re.search(rf"bench_entries:{name} .*failed", done.stdout)
        assert f"bench_entries:{name}" in (output / "failures.txt").read_text()
        assert f'raise RuntimeError("{message.partition(": ")[2]}")' in (output / "failures.txt").read_text()
    assert row(measured, "bench_entries:replicated")["status"] == "ok"


def test_all_files_have_one_provenance(measured: tuple[Done, Path]) -> None:
    said = json.loads((measured[1] / "provenance.json").read_text())
    assert said.pop("command").startswith("python -m ddp_compile bench --model bench_entries:tiny --implementations ")
    assert {name: str(value) for name, value in said.items()} == {
        name: row(measured, "ddp-eager")[name] for name in (*RUN_COLUMNS, *PROVENANCE_COLUMNS)
    }


def test_charts_are_drawn(measured: tuple[Done, Path]) -> None:
    names = {path.name for path in measured[1].glob("*.png")}
    assert {"step_time_by_link.png", "message_size.png", "gradient_ready.png", "timeline.png"} <= names


def test_nothing_is_left_after_success(measured: tuple[Done, Path]) -> None:
    assert left_behind(measured[0].pid) == []


def test_a_rank_that_dies_ends_the_run(tmp_path: Path) -> None:
    done = bench("--implementations", "bench_entries:dies", "--only-steps", "--output", str(tmp_path))
    assert done.returncode == 1
    assert "rank 1 of bench_entries:dies" in done.stderr and "exit code 7" in done.stderr
    assert "the last words of rank 1" in done.stderr
    assert left_behind(done.pid) == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_an_interrupt_cleans_up_though_it_is_repeated(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, temporary = tmp_path / "started", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setitem(ENVIRONMENT, "STARTED_FILE", str(started))
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(temporary))
    process = start("--implementations", "bench_entries:hangs", "--only-steps", "--output", str(tmp_path))
    deadline = time.monotonic() + 120
    while not started.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(process.pid)
    assert namespaces_of(process.pid) or unavailable_reason() is not None
    assert list(temporary.glob("ddp_compile_bench_*"))
    os.killpg(process.pid, number)
    time.sleep(0.005)
    os.killpg(process.pid, number)  # in the middle of the cleanup
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; all processes, namespaces and temporary files of the run are gone" in errors
    assert "Traceback" not in errors
    assert left_behind(process.pid) == []
    assert list(temporary.glob("ddp_compile_bench_*")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--implementations", "ddp"], "implementation 'ddp' is not known; pass one of local, ddp-eager"),
        (["--implementations", "nowhere:f"], "implementation 'nowhere:f' cannot be imported"),
        (["--model", "resnet"], "model 'resnet' is not known; pass one of mlp, gpt-small"),
        (["--modes", "fast"], "mode 'fast' is not known; pass some of default"),
        (["--link", "fast"], "mbit"),
        (["--rounds", "0"], "0 must be a whole number, at least 1"),
        (["--bucket-cap-mb", "0"], "0 must be a positive number of MiB"),
        (["--bucket-cap-mb", "x"], "x must be a positive number of MiB"),
        (["--implementations", ""], "name at least one"),
        (["--device", "cuda"], "torch sees no CUDA device"),
    ],
)
def test_bad_input_lists_what_is_known(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    try:
        status = main(["bench", *arguments])
    except SystemExit as ended:  # argparse's own way
        status = ended.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_run_on_a_simulated_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on one CUDA device: one real rank, and rates that are only pretended."""
    monkeypatch.chdir(HERE)
    monkeypatch.setattr("ddp_compile.bench.run.MESSAGE_BYTES", (2**20,))
    workload = WorkloadSettings(model="bench_entries:tiny")
    world_settings = WorldSettings(
        world_size=1, workload=workload, simulated_bits_per_second=1.5e8, simulated_world_size=4
    )
    cases = tuple(
        Case(implementation=name, bucket_cap_mb=25)
        for name in ("communication", "ddp-eager", "bench_entries:replicated")
    )
    link = SimulatedLink([Rate.parse("150mbit"), Rate.parse("75mbit")])
    with RankWorld(world_settings) as world:
        result = BenchmarkRun(world, link, RunSettings(cases=cases, rounds=2, steps=2), lambda _: None).measure()
    assert [case.error for case in result.cases] == [None, None, None]
    bits = 8 * result.cases[1].cold.gradient_bytes * 2 * 3 / 4
    for name, rate in (("simulated 150mbit", 1.5e8), ("simulated 75mbit", 7.5e7)):
        for case in result.cases:
            assert case.median(name) == pytest.approx(bits / rate, rel=0.15)
        assert result.achieved_gbit[name] == pytest.approx(rate / 1e9, rel=0.05)
        assert [case.profiles[name].num_all_reduces for case in result.cases[1:]] == [1, 1]
