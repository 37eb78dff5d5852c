"""Charts of a run: which are drawn from which data, and errors for malformed data files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from chart_data import (
    CAPS,
    CHARTS,
    COMPUTE_MS,
    EAGER,
    FAILING,
    LINKS,
    MESSAGE_COLUMNS,
    OURS,
    PEER,
    READY_COLUMNS,
    SUMMARY_COLUMNS,
    USERS,
    built,
    lines_by_label,
    message_rows,
    profiled_step,
    step_ms,
    summary_row,
    summary_rows,
    texts,
    write_all,
    write_csv,
    write_summary,
)
from matplotlib import rcParams
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread

from ddp_compile.bench.charts import draw_charts
from ddp_compile.bench.charts.appearance import describe, style_of
from ddp_compile.bench.charts.choice import Case, choose_cases, failures, gbit_of, implementation_order, link_order
from ddp_compile.bench.charts.data_files import Event, read_run
from ddp_compile.bench.charts.timeline import communication_ms, stack


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """The folder of a run, and the charts that were drawn into it."""
    directory = write_all(tmp_path_factory.mktemp("run"))
    return directory, draw_charts(directory)


@pytest.fixture(scope="module")
def figures(drawn: tuple[Path, list[Path]]) -> dict[str, Figure]:
    """The figures of the same run, by file name."""
    return {name: build(drawn[0], name) for name in CHARTS}


def build(directory: Path, name: str) -> Figure:
    figure = built(directory, name)
    assert figure is not None, f"{name} is not drawn"
    return figure


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
def test_titles_say_what_was_measured_axes_have_units_and_all_text_lies_on_the_page(
    figures: dict[str, Figure], name: str
) -> None:
    shown = texts(figures[name])
    for word in ("gpt-medium", "23.1 M parameters", "2 ranks", "cpu", "torch 2.13.0"):
        assert word in shown
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


# Which rows are compared.


def test_links_and_implementations_have_an_order() -> None:
    links = ["none", "10gbit", "loopback", "2.5gbit", "simulated 100gbit", "500mbit", "1 Gbit", "other"]
    expected = ["500mbit", "1 Gbit", "2.5gbit", "10gbit", "simulated 100gbit", "loopback", "none", "other"]
    assert sorted(links, key=link_order) == expected
    assert [gbit_of(link) for link in expected[:5]] == [0.5, 1.0, 2.5, 10.0, 100.0]
    names = ["local", "functional", EAGER, USERS, "ddp_compile-none", "ddp_compile-new", OURS]
    assert sorted(names, key=implementation_order) == [
        OURS, "ddp_compile-none", "ddp_compile-new", USERS, EAGER, "functional", "local",
    ]  # fmt: skip


def test_failures_are_told_apart_by_as_little_as_possible(tmp_path: Path) -> None:
    settings = [(link, cap) for link in ("none", "1gbit") for cap in CAPS]
    rows = [
        *(summary_row(link, OURS, "" if link == "none" else 1, bucket_cap_mb=cap) for link, cap in settings),
        *(summary_row(link, PEER, "" if cap == 25 else 1, bucket_cap_mb=cap) for link, cap in settings),
        *(
            summary_row(link, EAGER, "" if (link, cap) == ("none", 1) else 1, bucket_cap_mb=cap)
            for link, cap in settings
        ),
        *(summary_row(link, USERS, "", bucket_cap_mb=cap) for link, cap in settings),
        summary_row("none", "functional", 1),
    ]
    found = failures(read_run(write_summary(tmp_path, rows)).summary)
    assert found == [(OURS, ["not shaped"]), (USERS, []), (EAGER, ["not shaped 1 MiB"]), (PEER, ["25 MiB"])]


def test_cases_are_chosen_on_one_link_and_next_to_25_mib_where_no_step_was_measured() -> None:
    cases = [Case(PEER, "default", cap, link) for cap in (1.0, 20.0, 100.0) for link in ("none", "1gbit")]
    cases += [Case(OURS, mode, None, "1gbit") for mode in ("max-autotune", "default")]
    cases += [Case(EAGER, "default", 25.0, "100mbit")]
    assert choose_cases(cases, []) == [Case(OURS, "default", None, "1gbit"), Case(PEER, "default", 20.0, "1gbit")]
    assert choose_cases([], []) == []


# Data files.


def columns_of(name: str, *columns: str) -> Callable[[Path], None]:
    return lambda folder: write_csv(folder / name, list(columns), [dict.fromkeys(columns, "1")])


def timeline(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "timeline.json").write_text(text)


def no_number(folder: Path) -> None:
    rows = message_rows()
    rows[1]["all_reduce_ms"] = "1,5"
    write_csv(folder / "messages.csv", MESSAGE_COLUMNS, rows)


STEP = profiled_step(PEER, "none")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            columns_of("summary.csv", *(c for c in SUMMARY_COLUMNS if c not in ("link", "step_ms"))),
            "summary.csv lacks the columns link, step_ms; run the benchmark again, or delete the file",
        ),
        (
            columns_of("messages.csv", *MESSAGE_COLUMNS[:2]),
            "messages.csv lacks the columns all_reduce_ms, all_reduce_ms_p25, all_reduce_ms_p75; run",
        ),
        (columns_of("ready.csv", *READY_COLUMNS[:-1]), "ready.csv lacks the columns ready_mib; run"),
        (no_number, "messages.csv, line 3: all_reduce_ms='1,5' must be a number"),
        (timeline("{"), "timeline.json is not JSON"),
        (timeline("{}"), "timeline.json holds a dict and not a list"),
        (timeline("[3]"), "timeline.json, step 0 is an int and not an object"),
        (
            timeline('[{"mode": ""}]'),
            "timeline.json, step 0 lacks the keys implementation, bucket_cap_mb, link, step_ms, events",
        ),
        (
            timeline(json.dumps([STEP | {"events": [{"lane": "compute"}]}])),
            "timeline.json, step 0, events lacks the keys name, start_ms, end_ms",
        ),
        (timeline(json.dumps([STEP | {"step_ms": "long"}])), "timeline.json, step 0: step_ms='long' must be a number"),
    ],
)
def test_what_is_wrong_with_a_file_is_named_before_anything_is_drawn(
    tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    spoil(write_all(tmp_path))
    with pytest.raises(ValueError) as error:
        draw_charts(tmp_path)
    assert str(error.value).startswith(said)
    assert list(tmp_path.glob("*.png")) == []


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
    messages, steps = build(tmp_path, "message_size.png"), build(tmp_path, "step_time_by_link.png")
    assert len(lines_by_label(messages.axes[0])["not shaped"].get_xdata()) == 8
    assert [bar.get_width() for bar in steps.axes[0].patches] == [300]


# Step times.


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
    figure = build(write_summary(tmp_path, rows), "step_time_by_link.png")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [OURS, "compile-ddp (reduce-overhead)"]
    assert figure.axes[0].get_lines() == []  # neither local nor a bound was measured
    assert "failed" not in texts(figure)


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


def test_one_capacity_is_no_sweep_and_modes_need_compile_seconds(tmp_path: Path) -> None:
    rows = [row for row in summary_rows() if row["bucket_cap_mb"] == 10 or row["implementation"] == "local"]
    assert built(write_summary(tmp_path, rows), "bucket_cap_sweep.png") is None
    rows = [row | {"cold_compile_s": "", "warm_compile_s": ""} for row in summary_rows()]
    rows[2]["cold_compile_s"] = 3  # of a failed row
    assert built(write_summary(tmp_path, rows), "compile_modes.png") is None
    rows[0]["warm_compile_s"] = 3
    assert built(write_summary(tmp_path, rows), "compile_modes.png") is not None


# Communication.


def test_message_sizes_and_bandwidths_are_those_of_the_file(figures: dict[str, Figure]) -> None:
    times, bandwidths = figures["message_size.png"].axes
    assert times.get_xscale() == times.get_yscale() == bandwidths.get_xscale() == "log"
    for link, label in (("500mbit", "500mbit"), ("1gbit", "1gbit"), ("none", "not shaped")):
        rows = [row for row in message_rows() if row["link"] == link]
        line, rate = lines_by_label(times)[label], lines_by_label(bandwidths)[label]
        assert list(line.get_xdata()) == list(rate.get_xdata()) == [row["message_bytes"] for row in rows]
        assert list(line.get_ydata()) == pytest.approx([row["all_reduce_ms"] for row in rows])
        assert rate.get_ydata()[-1] == pytest.approx(LINKS[link], rel=0.02)
    dotted = [line.get_ydata()[0] for line in bandwidths.get_lines() if line.get_linestyle() == ":"]
    assert dotted == [0.5, 1.0]


def test_bandwidth_is_that_of_a_ring_and_so_comparable_with_the_rate(tmp_path: Path) -> None:
    """A ring of eight ranks sends 7/4 of a message over each link, which therefore takes that much longer."""
    rows = [row | {"all_reduce_ms": 0.4 + row["message_bytes"] * 8e-6 * 1.75} for row in message_rows()[:9]]
    link = rows[0]["link"]
    write_csv(tmp_path / "messages.csv", MESSAGE_COLUMNS, [row | {"link": "simulated 1gbit"} for row in rows])
    write_summary(tmp_path, [summary_row(link, OURS, 1), summary_row("simulated 1gbit", OURS, 1, world_size=8)])
    figure = build(tmp_path, "message_size.png")
    _, bandwidths = figure.axes
    assert lines_by_label(bandwidths)["simulated 1gbit"].get_ydata()[-1] == pytest.approx(1.0, rel=0.02)
    assert bandwidths.get_ylabel() == "bus bandwidth (Gbit/s)"
    assert "2 (n - 1) / n" in texts(figure)


@pytest.mark.parametrize("world_size", [1, ""])
def test_ranks_that_send_nothing_or_are_not_known_have_no_bandwidth(tmp_path: Path, world_size: int | str) -> None:
    write_csv(tmp_path / "messages.csv", MESSAGE_COLUMNS, message_rows())
    write_summary(tmp_path, [summary_row(link, OURS, 1, world_size=world_size) for link in LINKS])
    figure = build(tmp_path, "message_size.png")
    (times,) = figure.axes
    assert {"500mbit", "1gbit", "not shaped"} == set(lines_by_label(times))
    assert "us bandwidth" not in texts(figure)


def test_ready_gradients_are_those_of_the_fastest_capacity_on_the_slowest_link(figures: dict[str, Figure]) -> None:
    figure = figures["gradient_ready.png"]
    lines = lines_by_label(figure.axes[0])
    assert set(lines) == {OURS, PEER, EAGER}
    for line in lines.values():
        assert list(line.get_xdata()) == [0.0, *(10.0 * i + 10 for i in range(1, 21))]
        assert list(line.get_ydata()) == [2.0 * i for i in range(21)]
    assert "Link: 500mbit" in texts(figure)
    assert "failed: ddp-python-reducer" in texts(figure)


def test_the_timeline_has_a_panel_per_implementation_on_the_slowest_link(figures: dict[str, Figure]) -> None:
    figure = figures["timeline.png"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == [OURS, PEER, "local"]
    ours, peer, local = figure.axes
    lanes = [[label.get_text() for label in axes.get_yticklabels()] for axes in figure.axes]
    assert lanes == [["compute", "communication", "reducer"], ["compute", "communication"], ["compute"]]
    assert all(axes.get_xlim() == (0, 420) for axes in figure.axes)
    bars = {(bar.get_x(), bar.get_x() + bar.get_width()) for bar in ours.patches}
    assert {(0, 80), (80, 400), (400, 420), (100, 250), (200, 390), (98, 99), (220, 390)} <= bars
    # The all-reduces overlap, so they do not lie on one height.
    assert len({bar.get_y() for bar in peer.patches if bar.get_x() in (100, 200)}) == 2
    assert {text.get_text() for text in ours.texts} == {"forward", "backward"}
    # Backward begins at 80 and takes 100 alone.
    assert [line.get_xdata()[0] for line in peer.get_lines()] == [180]
    assert local.get_lines()[:] == []
    assert peer.get_title(loc="right") == "2 all-reduces, 290 ms, 80 ms of them before the dotted line, step 420 ms"
    assert "Link: 1gbit" in texts(figure) and "under the profiler, which stretches it" in texts(figure)


def test_a_timeline_without_local_has_no_line_and_unknown_lanes_are_left_out(tmp_path: Path) -> None:
    step = profiled_step(PEER, "none", None)
    step["events"].append({"lane": "else", "name": "else", "start_ms": 0, "end_ms": 9000})
    (tmp_path / "timeline.json").write_text(json.dumps([step, profiled_step(EAGER, "none") | {"events": []}]))
    figure = build(tmp_path, "timeline.png")
    (axes,) = figure.axes
    assert axes.get_lines()[:] == [] and axes.get_xlim() == (0, 420)
    assert axes.get_title(loc="right") == "2 all-reduces, 290 ms, step 420 ms"


def test_events_are_stacked_only_where_they_overlap() -> None:
    events = [
        Event("communication", str(i), start, end) for i, (start, end) in enumerate([(5, 9), (0, 5), (1, 3), (3, 4)])
    ]
    assert [[event.name for event in row] for row in stack(events)] == [["1", "0"], ["2", "3"]]
    assert communication_ms(events, 7.0) == (9.0, 7.0)
    assert communication_ms([], 7.0) == (0.0, 0.0)


def test_a_sharded_step_names_both_collectives(tmp_path: Path) -> None:
    step = profiled_step(OURS, "none")
    step["events"] = [event for event in step["events"] if event["lane"] != "communication"]
    spans = (("all-gather", 0, 50), ("reduce-scatter", 100, 380), ("all-gather", 405, 420))
    step["events"] += [{"lane": "communication", "name": n, "start_ms": a, "end_ms": b} for n, a, b in spans]
    (tmp_path / "timeline.json").write_text(json.dumps([step]))
    figure = build(tmp_path, "timeline.png")
    (axes,) = figure.axes
    assert axes.get_title(loc="right") == "2 all-gathers, 1 reduce-scatters, 345 ms, step 420 ms"
    assert {"reduce-scatter", "all-gather"} <= {text.get_text() for text in figure.legends[0].get_texts()}
