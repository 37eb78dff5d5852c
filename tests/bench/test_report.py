"""The files that a run leaves behind."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from ddp_compile.bench.report import PROVENANCE_COLUMNS, RUN_COLUMNS, provenance, write_files
from ddp_compile.bench.results import SUMMARY_COLUMNS
from ddp_compile.bench.run import RunResult


def test_every_run_says_where_its_files_come_from(tmp_path: Path) -> None:
    run = {"model": "mlp", "parameters": 3, "world_size": 2}
    where = {**provenance("cpu"), "command": "python -m ddp_compile bench --model mlp"}
    write_files(tmp_path, [], RunResult([]), run, where)
    assert json.loads((tmp_path / "provenance.json").read_text()) == {**run, **where}
    assert set(PROVENANCE_COLUMNS) < set(where) and all(where.values())
    with (tmp_path / "summary.csv").open(newline="") as file:
        assert next(csv.reader(file)) == [*RUN_COLUMNS, *SUMMARY_COLUMNS, *PROVENANCE_COLUMNS]
