"""Charts of a whole run: which are drawn, that nothing else is touched, and that they can be looked at."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from chart_data import (
    CHARTS,
    MESSAGE_COLUMNS,
    OURS,
    PEER,
    READY_COLUMNS,
    message_rows,
    summary_row,
    texts,
    write_all,
    write_csv,
    write_summary,
)
from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.image import imread

from ddp_compile.bench.charts import draw_charts
from ddp_compile.bench.charts.appearance import describe
from ddp_compile.bench.charts.data_files import read_run


def test_every_chart_is_drawn_beside_its_data(drawn: tuple[Path, list[Path]]) -> None:
    directory, paths = drawn
    assert paths == [directory / name for name in CHARTS]
    assert sorted(directory.glob("*.png")) == sorted(paths)


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_has_a_sensible_size_and_is_not_blank(drawn: tuple[Path, list[Path]], name: str) -> None:
    path = drawn[0] / name
    assert 8_000 < path.stat().st_size < 200_000
    pixels = imread(path)[:, :, :3]
    height, width, _ = pixels.shape
    assert 700 <= width <= 2400 and 300 <= height <= 2400
    middle = pixels[height // 4 : 3 * height // 4, width // 4 : 3 * width // 4]
    inked = (middle < 0.97).any(axis=2)
    assert inked.mean() > 0.01
    assert len({tuple(pixel) for pixel in middle[inked][::7].round(2).tolist()}) >= 5


def test_drawing_does_not_touch_pyplot_or_the_settings_of_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it raises
    before = repr(rcParams.copy())
    write_csv(tmp_path / "messages.csv", MESSAGE_COLUMNS, message_rows())
    assert len(draw_charts(tmp_path)) == 1
    assert repr(rcParams.copy()) == before


@pytest.mark.parametrize("name", CHARTS)
def test_titles_say_what_was_measured(figures: dict[str, Figure], name: str) -> None:
    shown = texts(figures[name])
    for word in ("gpt-medium", "23.1 M parameters", "2 ranks", "cpu", "torch 2.13.0"):
        assert word in shown


@pytest.mark.parametrize("name", CHARTS)
def test_axes_have_units_and_all_text_lies_on_the_page(figures: dict[str, Figure], name: str) -> None:
    figure = figures[name]
    figure.draw_without_rendering()
    labels = [label for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel()) if label]
    assert labels and all(label == "message size" or "(" in label for label in labels)
    page = figure.bbox
    for text in figure.texts:
        box = text.get_window_extent()
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
    for axes in figure.axes:
        box = axes.get_tightbbox()
        assert box is not None
        assert page.x0 <= box.x0 and box.x1 <= page.x1 + 1 and page.y0 <= box.y0 and box.y1 <= page.y1


def test_nothing_is_drawn_from_nothing(tmp_path: Path) -> None:
    assert draw_charts(tmp_path) == []
    for name in ("summary.csv", "messages.csv", "ready.csv", "timeline.json"):
        (tmp_path / name).write_text("")
    assert draw_charts(tmp_path) == []
    write_summary(tmp_path, [])
    write_csv(tmp_path / "messages.csv", MESSAGE_COLUMNS, [])
    write_csv(tmp_path / "ready.csv", READY_COLUMNS, [])
    (tmp_path / "timeline.json").write_text("[]")
    assert draw_charts(tmp_path) == []
    write_summary(tmp_path, [summary_row("none", name, "") for name in (OURS, PEER)])
    assert draw_charts(tmp_path) == []
    assert list(tmp_path.glob("*.png")) == []


@pytest.mark.parametrize(
    ("missing", "charts"),
    [
        ("summary.csv", ["message_size.png", "gradient_ready.png", "timeline.png"]),
        ("messages.csv", [name for name in CHARTS if name != "message_size.png"]),
        ("ready.csv", [name for name in CHARTS if name != "gradient_ready.png"]),
        ("timeline.json", [name for name in CHARTS if name != "timeline.png"]),
    ],
)
def test_a_missing_file_costs_only_its_charts(tmp_path: Path, missing: str, charts: list[str]) -> None:
    (write_all(tmp_path) / missing).unlink()
    run = read_run(tmp_path)
    assert [name for name, build in CHARTS.items() if build(run) is not None] == charts


def test_a_run_with_a_simulated_link_says_both_numbers_of_ranks(tmp_path: Path) -> None:
    rows = [
        summary_row("none", OURS, 1),
        summary_row("simulated 100gbit", OURS, 1, world_size=8, parameters=124_439_808),
    ]
    assert "23.1 M or 124 M parameters  ·  2 or 8 ranks" in describe(read_run(write_summary(tmp_path, rows)).summary)
