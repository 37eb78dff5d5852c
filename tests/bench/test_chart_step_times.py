"""Charts of step times: by link, by bucket capacity and by compile mode."""

from __future__ import annotations

from pathlib import Path

import pytest
from chart_data import (
    CAPS,
    COMPUTE_MS,
    EAGER,
    FAILING,
    OURS,
    PEER,
    USERS,
    built,
    lines_by_label,
    step_ms,
    summary_row,
    summary_rows,
    texts,
    write_summary,
)
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from ddp_compile.bench.charts import draw_charts
from ddp_compile.bench.charts.appearance import style_of


def test_step_times_are_those_of_the_fastest_capacity_on_each_link(figures: dict[str, Figure]) -> None:
    figure = figures["step_time_by_link.png"]
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["500mbit (0.47 Gbit/s)", "1gbit (0.95 Gbit/s)", "not shaped (9.8 Gbit/s)"]
    for axes, link in zip(figure.axes, ("500mbit", "1gbit", "none"), strict=True):
        bars = {round(bar.get_y() + bar.get_height() / 2): bar for bar in axes.patches}
        assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [OURS, USERS, EAGER, PEER, FAILING]
        expected = {i: step_ms(link, name, 10) for i, name in enumerate((OURS, USERS, EAGER, PEER))}
        assert {i: bar.get_width() for i, bar in bars.items()} == pytest.approx(expected)
        # Neither four micro-batches nor another mode, although their steps are shorter.
        assert to_hex(bars[0].get_facecolor()) == style_of(OURS).color
        assert [text.get_text().strip() for text in axes.texts].count("failed") == 1
        assert sorted(line.get_xdata()[0] for line in axes.get_lines()) == [COMPUTE_MS, 271]
        whiskers = {tuple(segment[:, 0]) for c in axes.collections for segment in c.get_segments()}
        median = step_ms(link, OURS, 10)
        assert (median - 5, median + 8) in whiskers
    assert "failed: ddp-python-reducer" in texts(figure).splitlines()


def test_an_implementation_without_the_default_mode_is_shown_in_its_own(tmp_path: Path) -> None:
    rows = [summary_row("none", OURS, 300), summary_row("none", PEER, 350, mode="reduce-overhead")]
    figure = built(write_summary(tmp_path, rows), "step_time_by_link.png")
    assert figure is not None
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [OURS, "compile-ddp (reduce-overhead)"]
    assert figure.axes[0].get_lines() == []  # neither local nor a bound was measured
    assert "failed" not in texts(figure)


@pytest.mark.long
def test_ten_implementations_on_six_links_keep_a_legible_size(tmp_path: Path) -> None:
    links = ("100mbit", "1gbit", "10gbit", "simulated 100gbit", "loopback", "none")
    names = [OURS, "ddp_compile-forward", "ddp_compile-none", "ddp_compile-backward", PEER, EAGER, "ddp-unsplit"]
    names += ["functional", USERS, "another_module.of_a_user.with_a_long_name:function_with_a_long_name"]
    rows = [summary_row(link, name, 300 + 9 * i) for link in links for i, name in enumerate(names)]
    paths = draw_charts(write_summary(tmp_path, rows))
    assert [path.name for path in paths] == ["step_time_by_link.png"]
    assert paths[0].stat().st_size < 200_000
    figure = built(tmp_path, "step_time_by_link.png")
    assert figure is not None
    width, height = figure.get_size_inches()
    assert 10 < width < 17 and 6 < height < 12
    assert len({to_hex(bar.get_facecolor()) for bar in figure.axes[0].patches}) == len(names)


def test_the_sweep_has_a_line_per_implementation_and_a_panel_per_link(figures: dict[str, Figure]) -> None:
    panels = figures["bucket_cap_sweep.png"].axes
    assert len(panels) == 3
    for axes, link in zip(panels, ("500mbit", "1gbit", "none"), strict=True):
        assert axes.get_xscale() == "log"
        lines = lines_by_label(axes)
        assert set(lines) == {OURS, PEER, EAGER, USERS}
        for name, line in lines.items():
            assert list(line.get_xdata()) == list(CAPS)
            assert list(line.get_ydata()) == pytest.approx([step_ms(link, name, cap) for cap in CAPS])
    legend = panels[-1].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [OURS, USERS, EAGER, PEER]


def test_one_capacity_is_no_sweep(tmp_path: Path) -> None:
    rows = [row for row in summary_rows() if row["bucket_cap_mb"] == 10 or row["implementation"] == "local"]
    assert built(write_summary(tmp_path, rows), "bucket_cap_sweep.png") is None


def test_modes_are_compared_on_the_link_with_most_of_them(figures: dict[str, Figure]) -> None:
    figure = figures["compile_modes.png"]
    steps, compiles = figure.axes
    assert [label.get_text() for label in steps.get_yticklabels()] == [OURS, USERS, EAGER, PEER, "local"]
    expected = [
        step_ms("none", OURS, 10),
        250.0,
        *(step_ms("none", name, 10) for name in (USERS, EAGER, PEER)),
        COMPUTE_MS,
    ]
    bars = sorted(steps.patches, key=lambda bar: bar.get_y())
    assert [bar.get_width() for bar in bars] == pytest.approx(expected)
    assert len({to_hex(bar.get_facecolor()) for bar in bars}) == 2
    assert sorted(bar.get_width() for bar in compiles.patches) == sorted([40, 8] * 3 + [200, 11] + [31, 7])
    assert "failed: compile-ddp (max-autotune), ddp-python-reducer" in texts(figure)
    assert "Link: not shaped" in texts(figure)


def test_modes_need_compile_seconds(tmp_path: Path) -> None:
    rows = [row | {"cold_compile_s": "", "warm_compile_s": ""} for row in summary_rows()]
    assert built(write_summary(tmp_path, rows), "compile_modes.png") is None
    rows[2]["cold_compile_s"] = 3  # of a failed row
    assert built(write_summary(tmp_path, rows), "compile_modes.png") is None
    rows[0]["warm_compile_s"] = 3
    assert built(write_summary(tmp_path, rows), "compile_modes.png") is not None
