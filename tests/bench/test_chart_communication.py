"""Charts of communication: message sizes, gradients that are ready, and the timeline of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chart_data import (
    EAGER,
    LINKS,
    MESSAGE_COLUMNS,
    OURS,
    PEER,
    built,
    lines_by_label,
    message_rows,
    profiled_step,
    summary_row,
    texts,
    write_csv,
    write_summary,
)
from matplotlib.figure import Figure

from ddp_compile.bench.charts.data_files import Event
from ddp_compile.bench.charts.timeline import communication_ms, stack


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
    figure = built(tmp_path, "message_size.png")
    assert figure is not None
    _, bandwidths = figure.axes
    assert lines_by_label(bandwidths)["simulated 1gbit"].get_ydata()[-1] == pytest.approx(1.0, rel=0.02)
    assert bandwidths.get_ylabel() == "bus bandwidth (Gbit/s)"
    assert "2 (n - 1) / n" in texts(figure)


@pytest.mark.parametrize("world_size", [1, ""])
def test_ranks_that_send_nothing_or_are_not_known_have_no_bandwidth(tmp_path: Path, world_size: int | str) -> None:
    write_csv(tmp_path / "messages.csv", MESSAGE_COLUMNS, message_rows())
    write_summary(tmp_path, [summary_row(link, OURS, 1, world_size=world_size) for link in LINKS])
    figure = built(tmp_path, "message_size.png")
    assert figure is not None
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
    figure = built(tmp_path, "timeline.png")
    assert figure is not None
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
    figure = built(tmp_path, "timeline.png")
    assert figure is not None
    (axes,) = figure.axes
    assert axes.get_title(loc="right") == "2 all-gathers, 1 reduce-scatters, 345 ms, step 420 ms"
    assert {"reduce-scatter", "all-gather"} <= {text.get_text() for text in figure.legends[0].get_texts()}
