"""Data files of charts: what is wrong with one is named, and what was not measured leaves a gap."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chart_data import (
    MESSAGE_COLUMNS,
    OURS,
    PEER,
    READY_COLUMNS,
    SUMMARY_COLUMNS,
    built,
    lines_by_label,
    message_rows,
    profiled_step,
    summary_row,
    write_all,
    write_csv,
    write_summary,
)

from ddp_compile.bench.charts import draw_charts


@pytest.mark.parametrize(
    ("name", "columns", "missing"),
    [
        ("summary.csv", [c for c in SUMMARY_COLUMNS if c not in ("link", "step_ms")], "link, step_ms"),
        ("messages.csv", MESSAGE_COLUMNS[:2], "all_reduce_ms, all_reduce_ms_p25, all_reduce_ms_p75"),
        ("ready.csv", READY_COLUMNS[:-1], "ready_mib"),
    ],
)
def test_wrong_columns_are_named_before_anything_is_drawn(
    tmp_path: Path, name: str, columns: list[str], missing: str
) -> None:
    write_csv(write_all(tmp_path) / name, columns, [dict.fromkeys(columns, "1")])
    with pytest.raises(ValueError) as error:
        draw_charts(tmp_path)
    assert str(error.value) == f"{name} lacks the columns {missing}; run the benchmark again, or delete the file"
    assert list(tmp_path.glob("*.png")) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "timeline.json is not JSON"),
        ("{}", "timeline.json holds a dict and not a list"),
        ("[3]", "timeline.json, step 0 is an int and not an object"),
        ('[{"mode": ""}]', "timeline.json, step 0 lacks the keys implementation, bucket_cap_mb, link, step_ms, events"),
        (
            json.dumps([profiled_step(PEER, "none") | {"events": [{"lane": "compute"}]}]),
            "timeline.json, step 0, events lacks the keys name, start_ms, end_ms",
        ),
        (
            json.dumps([profiled_step(PEER, "none") | {"step_ms": "long"}]),
            "timeline.json, step 0: step_ms='long' must be a number",
        ),
    ],
)
def test_a_wrong_timeline_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "timeline.json").write_text(text)
    with pytest.raises(ValueError) as error:
        draw_charts(tmp_path)
    assert str(error.value).startswith(message)


def test_what_is_no_number_is_named_with_its_line(tmp_path: Path) -> None:
    rows = message_rows()
    rows[1]["all_reduce_ms"] = "1,5"
    write_csv(tmp_path / "messages.csv", MESSAGE_COLUMNS, rows)
    with pytest.raises(ValueError, match=r"^messages\.csv, line 3: all_reduce_ms='1,5' must be a number"):
        draw_charts(tmp_path)


@pytest.mark.parametrize("figure", ["", "nan", "inf"])
def test_figures_that_were_not_measured_leave_gaps(tmp_path: Path, figure: str) -> None:
    rows = message_rows()
    rows[0]["all_reduce_ms"] = figure
    rows[1]["all_reduce_ms_p25"] = figure
    write_csv(tmp_path / "messages.csv", MESSAGE_COLUMNS, rows)
    write_summary(
        tmp_path,
        [summary_row("none", OURS, 300, step_ms_p25=figure), summary_row("none", PEER, 9) | {"step_ms": figure}],
    )
    messages, steps = built(tmp_path, "message_size.png"), built(tmp_path, "step_time_by_link.png")
    assert messages is not None and steps is not None
    assert len(lines_by_label(messages.axes[0])["not shaped"].get_xdata()) == 8
    assert [bar.get_width() for bar in steps.axes[0].patches] == [300]
