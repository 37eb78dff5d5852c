"""The data files of an invented benchmark run, for tests of the charts.

Tests that import this are skipped without matplotlib, which is optional.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from ddp_compile.bench import results
from ddp_compile.bench.charts import CHARTS
from ddp_compile.bench.charts.data_files import read_run
from ddp_compile.bench.report import PROVENANCE_COLUMNS, RUN_COLUMNS

SUMMARY_COLUMNS = [*RUN_COLUMNS, *results.SUMMARY_COLUMNS, *PROVENANCE_COLUMNS]
MESSAGE_COLUMNS = ["link", "message_bytes", "all_reduce_ms", "all_reduce_ms_p25", "all_reduce_ms_p75", "cpu_ms"]
READY_COLUMNS = ["implementation", "mode", "bucket_cap_mb", "link", "ms", "ready_mib"]

LINKS = {"none": 9.8, "1gbit": 0.95, "500mbit": 0.47}
CAPS = (1, 10, 25)
OURS, PEER, EAGER, FAILING, USERS = (
    "ddp_compile-auto",
    "compile-ddp",
    "ddp-eager",
    "ddp-python-reducer",
    "my.module:replicated",
)
COMPUTE_MS = 262.0


def summary_row(link: str, implementation: str, step_ms: float | str, **others: Any) -> dict[str, Any]:
    row = dict.fromkeys(SUMMARY_COLUMNS, "") | {
        "model": "gpt-medium",
        "parameters": 23_130_112,
        "world_size": 2,
        "link": link,
        "achieved_gbit": LINKS.get(link, ""),
        "implementation": implementation,
        "mode": "default",
        "bucket_cap_mb": 25,
        "no_sync_every": 1,
        "step_ms": step_ms,
        "status": "ok",
        "torch": "2.13.0",
        "device": "cpu",
    }
    if step_ms != "":
        row |= {"step_ms_p25": float(step_ms) - 5, "step_ms_p75": float(step_ms) + 8, "num_steps": 30}
    else:
        row |= {"status": "failed", "error": "RuntimeError: no"}
    return row | others


def step_ms(link: str, implementation: str, cap: float) -> float:
    """Shortest with 10 MiB; every implementation and link has its own."""
    slowness = {OURS: 20, PEER: 40, EAGER: 60, USERS: 50}[implementation]
    return COMPUTE_MS + 300 / LINKS[link] + slowness + abs(cap - 10)


def summary_rows() -> list[dict[str, Any]]:
    rows = []
    for link in LINKS:
        rows.append(summary_row(link, "local", COMPUTE_MS, cold_compile_s=31, warm_compile_s=7))
        rows.append(summary_row(link, "communication", 300 / LINKS[link]))
        rows.append(summary_row(link, FAILING, ""))
        for name in (OURS, PEER, EAGER, USERS):
            compiling = {} if name == EAGER else {"cold_compile_s": 40, "warm_compile_s": 8}
            rows += [
                summary_row(link, name, step_ms(link, name, cap), bucket_cap_mb=cap, bound_ms=270 + cap, **compiling)
                for cap in CAPS
            ]
    rows.append(summary_row("none", OURS, 250, mode="max-autotune", cold_compile_s=200, warm_compile_s=11))
    rows.append(summary_row("none", PEER, "", mode="max-autotune"))
    rows.append(summary_row("1gbit", OURS, 1.0, no_sync_every=4))
    return rows


def message_rows() -> list[dict[str, Any]]:
    times = {(link, 2**k): 0.4 + 2**k * 8e-6 / gbit for link, gbit in LINKS.items() for k in range(10, 28, 2)}
    return [
        dict(zip(MESSAGE_COLUMNS, (link, size, ms, 0.9 * ms, 1.2 * ms, ms / 2), strict=True))
        for (link, size), ms in times.items()
    ]


def ready_rows() -> list[dict[str, Any]]:
    return [
        dict(zip(READY_COLUMNS, (name, "default", cap, link, 10.0 * i + cap, 2.0 * i), strict=True))
        for name in (OURS, PEER, EAGER)
        for cap in CAPS
        for link in LINKS
        for i in range(1, 21)
    ]


def profiled_step(implementation: str, link: str, bucket_cap_mb: float | None = 10) -> dict[str, Any]:
    end = 180.0 if implementation == "local" else 400.0
    events = [("compute", "forward", 0, 80), ("compute", "backward", 80, end), ("compute", "optimizer", end, end + 20)]
    if implementation != "local":
        events += [("communication", "gloo:all_reduce", 100, 250), ("communication", "gloo:all_reduce", 200, 390)]
    if implementation == OURS:
        events += [
            ("reducer", "ddp_compile::bucket_0_launch", 98, 99),
            ("reducer", "ddp_compile::bucket_0_wait", 220, 390),
        ]
    keys = ("lane", "name", "start_ms", "end_ms")
    return {
        "implementation": implementation,
        "mode": "default",
        "bucket_cap_mb": bucket_cap_mb,
        "link": link,
        "step_ms": end + 20,
        "events": [dict(zip(keys, event, strict=True)) for event in events],
    }


def write_csv(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def write_summary(directory: Path, rows: list[dict[str, Any]]) -> Path:
    write_csv(directory / "summary.csv", SUMMARY_COLUMNS, rows)
    return directory


def write_all(directory: Path) -> Path:
    write_summary(directory, summary_rows())
    write_csv(directory / "messages.csv", MESSAGE_COLUMNS, message_rows())
    write_csv(directory / "ready.csv", READY_COLUMNS, ready_rows())
    timeline = [profiled_step(name, link) for name in (OURS, PEER, "local") for link in ("1gbit", "none")]
    (directory / "timeline.json").write_text(json.dumps(timeline))
    return directory


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.texts)


def built(directory: Path, name: str) -> Figure | None:
    return CHARTS[name](read_run(directory))


def lines_by_label(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.get_lines()}
