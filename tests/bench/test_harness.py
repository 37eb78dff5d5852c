"""Whole runs of the harness: what it measures, how it handles failures, and that it leaves nothing behind."""

import contextlib
import csv
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import bench_entries
import pytest
from harness_runs import BENCH, HERE, QUICK_COMPILES, left_behind

from ddp_compile.__main__ import main
from ddp_compile.bench.link import Rate, unavailable_reason
from ddp_compile.bench.links import SimulatedLink
from ddp_compile.bench.rank_world import RankWorld, WorldSettings
from ddp_compile.bench.report import PROVENANCE_COLUMNS, RUN_COLUMNS
from ddp_compile.bench.results import SUMMARY_COLUMNS, CaseResult
from ddp_compile.bench.run import BenchmarkRun, RunSettings
from ddp_compile.bench.settings import Case, WorkloadSettings

pytestmark = pytest.mark.alone
needs_links = pytest.mark.skipif(unavailable_reason() is not None, reason=f"no real links: {unavailable_reason()}")


class Measured(NamedTuple):
    stdout: str
    folder: Path


measure_warm_start = BenchmarkRun._measure_warm_start


def measure_one_warm_start(run: BenchmarkRun, result: CaseResult) -> None:
    """Processes take seconds to begin, and the bounds inductor too."""
    if result.case.implementation == "bench_entries:replicated":
        measure_warm_start(run, result)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    """A run in this process, which has imported all that it needs."""
    folder = tmp_path_factory.mktemp("run")
    implementations = ",".join(f"bench_entries:{name}" for name in ("delayed", "replicated", "fails_later"))
    arguments = [
        *("--implementations", f"{implementations},bench_entries:fails_at_once,ddp-eager", "--rounds", "2"),
        *("--link", "1gbit,none", "--bucket-cap-mb", "0.25", "--output", str(folder)),
    ]
    stdout = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(stdout):
        patch.chdir(HERE)
        patch.setattr("ddp_compile.bench.run.RATE_BYTES", 2**23)  # 32 MiB take seconds
        patch.setattr(BenchmarkRun, "_measure_warm_start", measure_one_warm_start)
        for name, value in QUICK_COMPILES.items():
            patch.setenv(name, value)
        assert main([*BENCH, *arguments]) == 0
    yield Measured(stdout.getvalue(), folder)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def row(measured: Measured, implementation: str, link: str | None = None) -> dict[str, str]:
    found = [r for r in rows_of(measured.folder / "summary.csv") if r["implementation"] == implementation]
    return found[0] if link is None else next(r for r in found if r["link"] == link)


def test_a_known_delay_is_measured(measured: Measured) -> None:
    for link in {r["link"] for r in rows_of(measured.folder / "summary.csv")}:
        plain = row(measured, "local", link)
        delayed = row(measured, "bench_entries:delayed", link)
        for column in ("step_ms", "forward_ms"):  # that is where it lies
            delay_s = (float(delayed[column]) - float(plain[column])) / 1000
            # Other work of the machine may affect either median.
            assert delay_s == pytest.approx(bench_entries.DELAY_S, rel=0.15)
        assert float(delayed["cpu_ms"]) < 1000 * bench_entries.DELAY_S  # sleeping takes no processor time


def test_columns_and_counts(measured: Measured) -> None:
    rows = rows_of(measured.folder / "summary.csv")
    assert list(rows[0]) == [*RUN_COLUMNS, *SUMMARY_COLUMNS, *PROVENANCE_COLUMNS]
    gradient_mib = 4 * 2 * 256 * 256 / 2**20
    ours = row(measured, "bench_entries:replicated")
    assert ours["all_reduces"] == "2"  # a bucket of 0.25 MiB for each layer
    assert float(ours["payload_mib"]) == pytest.approx(gradient_mib, rel=1e-3)
    assert ours["num_steps"] == "4"
    # Parameters, the flat buffers that the gradients are views of, and a little for the batches and activations.
    assert 2 * gradient_mib < float(ours["peak_mib"]) < 4 * gradient_mib
    assert float(ours["loss"]) == pytest.approx(float(row(measured, "ddp-eager")["loss"]), rel=1e-6)
    assert row(measured, "local")["all_reduces"] == "0"
    assert row(measured, "local")["graphs"] == "1"
    for name in PROVENANCE_COLUMNS:
        assert ours[name]


def test_shown_percentages_and_bounds_come_from_the_same_run(measured: Measured) -> None:
    ours, best = row(measured, "bench_entries:replicated"), row(measured, "ddp-eager")
    assert float(best["ratio_to_best_peer"]) == 1.0
    assert float(ours["ratio_low"]) <= float(ours["ratio_to_best_peer"]) <= float(ours["ratio_high"])
    local = row(measured, "local")
    assert best["exposed_ms"] == ""  # eager, so its computation is another one
    exposed = float(ours["step_ms"]) - float(local["step_ms"])
    assert float(ours["exposed_ms"]) == pytest.approx(exposed, abs=1e-3 * float(ours["step_ms"]))
    assert float(ours["bound_ms"]) >= float(local["step_ms"]) * 0.999


@needs_links
def test_links_have_their_rates_and_count_what_is_sent(measured: Measured) -> None:
    slow, unshaped = (row(measured, "bench_entries:replicated", link) for link in ("1gbit", "none"))
    # No more than the link lets through. How much of that gloo reaches is the machine's; `test_link` asks for the rate.
    assert 0 < float(slow["achieved_gbit"]) < 1.15
    assert float(unshaped["achieved_gbit"]) > float(slow["achieved_gbit"])
    # Each of two ranks sends half of the sum and half of the result, and headers.
    assert float(slow["sent_mib"]) == pytest.approx(float(slow["payload_mib"]), rel=0.15)


def test_failing_implementations_stay_in_the_table(measured: Measured) -> None:
    stdout, output = measured
    for name, message in (
        ("fails_at_once", "RuntimeError: this implementation cannot be built"),
        ("fails_later", "RuntimeError: this implementation breaks down"),
    ):
        for found in (r for r in rows_of(output / "summary.csv") if r["implementation"] == f"bench_entries:{name}"):
            assert (found["status"], found["error"], found["step_ms"]) == ("failed", message, "")
        assert re.search(rf"bench_entries:{name} .*failed", stdout)
        assert f"bench_entries:{name}" in (output / "failures.txt").read_text()
        assert f'raise RuntimeError("{message.partition(": ")[2]}")' in (output / "failures.txt").read_text()
    assert row(measured, "bench_entries:replicated")["status"] == "ok"


def test_nothing_is_left_after_success(measured: Measured) -> None:
    assert left_behind(os.getpid()) == []


@pytest.mark.long
def test_a_run_on_a_simulated_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on one CUDA device: one real rank, and rates that are only pretended."""
    monkeypatch.chdir(HERE)
    # 56 ms at the higher rate, since a process that sleeps may be woken milliseconds late.
    monkeypatch.setattr("ddp_compile.bench.run.RATE_BYTES", 2**20)
    monkeypatch.setattr(BenchmarkRun, "_measure_warm_start", lambda *_: None)  # it does not use a link
    workload = WorkloadSettings(model="bench_entries:tiny")
    world_settings = WorldSettings(
        world_size=1, workload=workload, simulated_bits_per_second=1.5e8, simulated_world_size=4
    )
    cases = tuple(Case(implementation=name, bucket_cap_mb=25) for name in ("communication", "bench_entries:replicated"))
    link = SimulatedLink([Rate.parse("150mbit"), Rate.parse("75mbit")])
    settings = RunSettings(cases=cases, rounds=1, steps=4, traces=tmp_path)
    with RankWorld(world_settings) as world:
        result = BenchmarkRun(world, link, settings, lambda _: None).measure()
    assert [case.error for case in result.cases] == [None, None]
    bits = 8 * result.cases[1].cold.gradient_bytes * 2 * 3 / 4
    for name, rate in (("simulated 150mbit", 1.5e8), ("simulated 75mbit", 7.5e7)):
        for case in result.cases:
            # The shortest: a step can only be late, where others are busy on the same cores.
            assert min(step.step_s for step in case.steps(name)) == pytest.approx(bits / rate, rel=0.15)
        assert result.achieved_gbit[name] == pytest.approx(rate / 1e9, rel=0.1)
        assert result.cases[1].profiles[name].num_all_reduces == 1
