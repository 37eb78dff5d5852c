"""A run's table on the terminal, and its figures in files."""

import csv
import itertools
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from ddp_compile import __version__
from ddp_compile.bench.provenance import commit, processor
from ddp_compile.bench.results import IDENTITY_COLUMNS, SUMMARY_COLUMNS, SummaryRow, identity
from ddp_compile.bench.run import RunResult

RUN_COLUMNS = ["model", "parameters", "world_size", "clip", "tokens"]
PROVENANCE_COLUMNS = ["commit", "date", "ddp_compile", "torch", "python", "device", "machine"]

#: The terminal's table: heading, column, format.
_TABLE = (
    ("implementation", "implementation", ""),
    ("mode", "mode", ""),
    ("cap MiB", "bucket_cap_mb", "g"),
    ("ms a step", "step_ms", ".1f"),
    ("p25", "step_ms_p25", ".1f"),
    ("p75", "step_ms_p75", ".1f"),
    ("x best peer", "ratio_to_best_peer", ".3f"),
    ("from", "ratio_low", ".3f"),
    ("to", "ratio_high", ".3f"),
    ("x bound", "ratio_to_bound", ".3f"),
    ("exposed ms", "exposed_ms", ".1f"),
    ("peak MiB", "peak_mib", ".1f"),
    ("cold s", "cold_compile_s", ".1f"),
    ("warm s", "warm_compile_s", ".1f"),
    ("graphs", "graphs", "d"),
    ("all-reduces", "all_reduces", "d"),
    ("payload MiB", "payload_mib", ".2f"),
    ("sent MiB", "sent_mib", ".2f"),
    ("loss", "loss", ".5f"),
)


def format_tables(rows: Sequence[SummaryRow]) -> str:
    """One table for each link, with the bound beneath its heading; a failed case says so in its row."""
    tables = []
    for link, group in itertools.groupby(rows, key=lambda row: row.link):
        of_link = list(group)
        achieved = of_link[0].achieved_gbit
        heading = f"link {link}" + ("" if achieved is None else f", all-reduce of 32 MiB at {achieved:.2f} Gbit/s")
        bounds = {(row.bucket_cap_mb, row.mode): row.bound_ms for row in of_link if row.bound_ms is not None}
        ideal = ", ".join(f"{bound:.1f} ms (cap {cap:g} MiB, mode {mode})" for (cap, mode), bound in bounds.items())
        body = [[_cell(row, column, style) for _, column, style in _TABLE] for row in of_link]
        used = [i for i in range(len(_TABLE)) if any(cells[i] for cells in body)]
        table = tabulate(
            [[cells[i] for i in used] for cells in body],
            headers=[_TABLE[i][0] for i in used],
            disable_numparse=True,
            colalign=["left" if not _TABLE[i][2] else "right" for i in used],
        )
        tables.append(f"{heading}\nideal overlap: {ideal or 'not known'}\n{table}")
    return "\n\n".join(tables)


def write_files(
    directory: Path,
    rows: Sequence[SummaryRow],
    result: RunResult,
    run: Mapping[str, Any],
    provenance: Mapping[str, str],
) -> None:
    """Write all figures of a run, with their provenance, to a folder, which is made if it is not there.

    The files: provenance.json, summary.csv, steps.csv and, if anything failed, failures.txt. ``run`` has the values of
    `RUN_COLUMNS`. ``provenance`` has those of `PROVENANCE_COLUMNS`, and more that holds for all files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "provenance.json").write_text(json.dumps({**run, **provenance}, indent=1) + "\n")
    in_every_row = {name: provenance[name] for name in PROVENANCE_COLUMNS}
    write_csv(
        directory / "summary.csv",
        [*RUN_COLUMNS, *SUMMARY_COLUMNS, *PROVENANCE_COLUMNS],
        ({**run, **asdict(row), **in_every_row} for row in rows),
    )
    write_csv(directory / "steps.csv", [*IDENTITY_COLUMNS, "round", "step", *_STEP_COLUMNS], _step_rows(result))
    failures = [f"{case.case}\n{case.traceback}" for case in result.cases if case.error is not None]
    (directory / "failures.txt").unlink(missing_ok=True)
    if failures:
        (directory / "failures.txt").write_text("\n\n".join(failures))


def provenance(device: str) -> dict[str, str]:
    """Values of `PROVENANCE_COLUMNS`: commit, versions and machine."""
    return {
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "ddp_compile": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "machine": f"{processor()}, {os.cpu_count()} cores",
    }


_STEP_COLUMNS = ["step_ms", "forward_ms", "backward_ms", "optimizer_ms", "cpu_ms"]


def _cell(row: SummaryRow, column: str, style: str) -> str:
    value = getattr(row, column)
    if column == "step_ms" and row.status == "failed":
        return "failed"
    return "" if value is None else format(value, style)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a file, floats with six digits. Who is stopped meanwhile leaves the file as it was."""
    begun = path.with_suffix(".part")
    with begun.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: f"{v:.6g}" if isinstance(v, float) else v for name, v in row.items()})
    begun.replace(path)


def report_rows(rows: Sequence[Mapping[str, Any]], path: Path | None, **about: object) -> None:
    """Print a script's rows, with processor, torch, commit and ``about``; also write them to ``path``, if given."""
    about = {"processor": processor(), "torch": torch.__version__, "commit": commit(), **about}
    print(", ".join(map(str, about.values())))
    print(tabulate(rows, headers="keys"))
    if path is not None:
        write_csv(path, [*rows[0], *about], ({**row, **about} for row in rows))


def _step_rows(result: RunResult) -> Iterable[dict[str, Any]]:
    for case in result.cases:
        for link, rounds in case.rounds.items():
            for number, turn in enumerate(rounds):
                for i, step in enumerate(turn):
                    times = {name: 1000 * getattr(step, name.replace("_ms", "_s")) for name in _STEP_COLUMNS}
                    yield {**identity(case.case, link), "round": number, "step": i, **times}
