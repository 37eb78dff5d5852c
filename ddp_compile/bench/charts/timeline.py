"""One profiled step of each implementation: what runs during the backward."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ddp_compile.bench.charts.appearance import (
    DARK,
    SMALL_SIZE,
    TEXT_SIZE,
    case_label,
    clean,
    color_of_name,
    describe,
    failed_note,
    link_label,
    new_page,
)
from ddp_compile.bench.charts.choice import Case, choose_cases
from ddp_compile.bench.charts.data_files import BenchmarkRun, Event, ProfiledStep
from ddp_compile.bench.implementations import LOCAL

_LANES = ("compute", "communication", "reducer")
_PHASE_COLORS = {"forward": "#a9c6de", "backward": "#4f86b8", "optimizer": "#c9b98f"}
# Used in turn, so that consecutive all-reduces differ.
_LANE_COLORS = {
    "compute": ("#9a9a9a", "#9a9a9a"),
    "communication": ("#c8553d", "#e39b88"),
    "reducer": ("#444444", "#8a8a8a"),
}
_SHARD_COLORS = {"reduce-scatter": ("#c8553d", "#e39b88"), "all-gather": ("#3f8f5b", "#93c4a3")}
_WAIT_COLOR = "#cfcfcf"
_ALONE_LINE: dict[str, Any] = {"color": "black", "linestyle": ":", "linewidth": 1.6}
_BACKWARD_SHADE = "#e9f1f8"
_NARROWEST_LABELED = 0.06


def build_timeline(run: BenchmarkRun) -> Figure | None:
    """A panel for each implementation, with its lanes over a common time axis."""
    steps = {Case(step.implementation, step.mode, step.bucket_cap_mb, step.link): step for step in run.timeline}
    cases = choose_cases([case for case, step in steps.items() if _lanes(step)], run.summary)
    if not cases:
        return None
    chosen = [steps[case] for case in cases]
    lanes = list(map(_lanes, chosen))
    end = max(event.end_ms for step in chosen for event in step.events if event.lane in _LANES)
    alone_ms = next((_backward_ms(step) for step in chosen if step.implementation == LOCAL), None)
    figure = new_page(
        (11.0, 0.9 + sum(0.42 + 0.24 * len(own) for own in lanes)),
        "Timeline of one step",
        describe(run.summary),
        [
            f"Link: {link_label(cases[0].link)}. One step of rank 0 under the profiler, which stretches it: read the "
            "order and the overlap here, and the times in the other charts.",
            "Shaded: the backward, including the waits at its end.",
            failed_note(row for row in run.summary if row.link == cases[0].link),
        ],
        _legend(alone_ms is not None and len(chosen) > 1, {_kind(event) for step in chosen for event in step.events}),
    )
    grid = figure.subplots(
        len(chosen), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [0.9 + len(own) for own in lanes]}
    )
    panels: list[Axes] = list(grid.flat)
    for axes, step, own in zip(panels, chosen, lanes, strict=True):
        _draw_step(axes, step, own, end)
        alone_end = _alone_end(step, alone_ms)
        if alone_end is not None:
            axes.axvline(alone_end, **_ALONE_LINE)
        _write_title(axes, step, alone_end)
    panels[-1].set_xlim(0, end)
    panels[-1].set_xlabel("time since the step began (ms, profiled)", fontsize=TEXT_SIZE)
    return figure


def communication_ms(events: Iterable[Event], until_ms: float) -> tuple[float, float]:
    """Milliseconds with a collective under way, in total and before a point in time."""
    spans = _union((event.start_ms, event.end_ms) for event in events if event.lane == "communication")
    before = sum(max(0.0, min(end, until_ms) - start) for start, end in spans)
    return sum(end - start for start, end in spans), before


def stack(events: Iterable[Event]) -> list[list[Event]]:
    """Rows in which no two events overlap, as few as possible."""
    rows: list[list[Event]] = []
    for event in sorted(events, key=lambda event: (event.start_ms, event.end_ms)):
        free = next((row for row in rows if row[-1].end_ms <= event.start_ms), None)
        if free is None:
            rows.append([event])
        else:
            free.append(event)
    return rows


def _lanes(step: ProfiledStep) -> list[str]:
    """The lanes that hold something, from top to bottom."""
    return [lane for lane in _LANES if any(event.lane == lane for event in step.events)]


def _draw_step(axes: Axes, step: ProfiledStep, lanes: Sequence[str], end: float) -> None:
    for event in filter(_is_backward, step.events):
        axes.axvspan(event.start_ms, event.end_ms, color=_BACKWARD_SHADE, linewidth=0, zorder=0)
    for position, lane in enumerate(lanes):
        rows = stack(event for event in step.events if event.lane == lane)
        in_order = sorted(itertools.chain(*rows), key=lambda event: event.start_ms)
        shade = {event: i % 2 for i, event in enumerate(in_order)}
        height = 0.8 / len(rows)
        for i, row in enumerate(rows):
            middle = position - 0.4 + (i + 0.5) * height
            for event in row:
                color = _color(event, shade[event])
                length = event.end_ms - event.start_ms
                # The edge keeps events shorter than a pixel visible.
                axes.barh(
                    middle, length, left=event.start_ms, height=0.9 * height, color=color, edgecolor=color, lw=0.4
                )
                if event.name in _PHASE_COLORS and length > _NARROWEST_LABELED * end:
                    _write_in(axes, event, middle)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    clean(axes, "x")
    axes.tick_params(axis="y", length=0)


def _color(event: Event, shade: int) -> str:
    if event.lane == "reducer" and "wait" in event.name.lower():
        return _WAIT_COLOR
    return _PHASE_COLORS.get(event.name) or _SHARD_COLORS.get(_kind(event), _LANE_COLORS[event.lane])[shade]


def _kind(event: Event) -> str:
    """The name of the collective; empty for other events."""
    if event.lane != "communication":
        return ""
    kernels = {"ReduceScatter": "reduce-scatter", "AllGather": "all-gather"}
    return next((kind for part, kind in kernels.items() if part in event.name or kind == event.name), "all-reduce")


def _write_in(axes: Axes, event: Event, middle: float) -> None:
    color = "white" if event.name == "backward" else "black"
    x = (event.start_ms + event.end_ms) / 2
    axes.text(x, middle, event.name, ha="center", va="center", fontsize=SMALL_SIZE, color=color)


def _write_title(axes: Axes, step: ProfiledStep, alone_end: float | None) -> None:
    """The implementation on the left; on the right, how much it communicates and how early."""
    color = color_of_name(step.implementation)
    name = case_label(step.implementation, step.mode)
    axes.set_title(name, loc="left", fontsize=TEXT_SIZE, fontweight="bold", color=color, pad=3)
    words = [] if step.step_ms is None else [f"step {step.step_ms:.4g} ms"]
    counts = Counter(filter(None, map(_kind, step.events)))
    total, before = communication_ms(step.events, math.inf if alone_end is None else alone_end)
    if counts and alone_end is not None:
        words.insert(0, f"{before:.3g} ms of them before the dotted line")
    if counts:
        words.insert(0, ", ".join([*(f"{num} {kind}s" for kind, num in counts.items()), f"{total:.3g} ms"]))
    axes.set_title(", ".join(words), loc="right", fontsize=SMALL_SIZE, color=DARK, pad=3)


def _alone_end(step: ProfiledStep, alone_ms: float | None) -> float | None:
    """When a step's last backward would end if it took as long as one that does not communicate."""
    begin = max((event.start_ms for event in step.events if _is_backward(event)), default=None)
    return None if begin is None or alone_ms is None or step.implementation == LOCAL else begin + alone_ms


def _backward_ms(step: ProfiledStep) -> float | None:
    """Length of the last backward, the one that communicates."""
    backwards = [event for event in step.events if _is_backward(event)]
    last = max(backwards, key=lambda event: event.start_ms, default=None)
    return None if last is None else last.end_ms - last.start_ms


def _is_backward(event: Event) -> bool:
    return event.lane == "compute" and event.name == "backward"


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same stretches of time without overlaps, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _legend(with_line: bool, kinds: Set[str]) -> list[Artist]:
    entries: list[Artist] = [Patch(color=color, label=name) for name, color in _PHASE_COLORS.items()]
    colors = {"all-reduce": _LANE_COLORS["communication"], **_SHARD_COLORS}
    entries += [Patch(color=color, label=kind) for kind, (color, _) in colors.items() if kind in kinds]
    if with_line:
        label = "end of the backward if it took as long as in local"
        entries.append(Line2D([], [], label=label, **_ALONE_LINE))
    return entries
