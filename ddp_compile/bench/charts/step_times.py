"""Step times: of each implementation on each link, and against the capacity of the buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ddp_compile.bench.charts.appearance import (
    SMALL_SIZE,
    TEXT_SIZE,
    case_label,
    clean,
    describe,
    draw_step_bar,
    emphasize_ours,
    failed_note,
    link_label,
    new_page,
    put_legend,
    style_of,
    users_among,
)
from ddp_compile.bench.charts.choice import (
    comparable_rows,
    fastest,
    headline_modes,
    implementation_order,
    is_measured,
    link_order,
)
from ddp_compile.bench.charts.data_files import BenchmarkRun, SummaryRow
from ddp_compile.bench.implementations import LOCAL

_COLUMNS = 4
_CAPS = (
    "Bucket capacity: the one with the shortest step of each implementation; the ideal bound is the lowest of theirs."
)
_REACHED = "Next to a link's name: the rate that was reached on it."
_LOCAL_LINE: dict[str, Any] = {"color": "black", "linestyle": ":", "linewidth": 1.5}
_BOUND_LINE: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.2}


def build_step_time_by_link(run: BenchmarkRun) -> Figure | None:
    """A panel for each link, slowest first: a bar for each implementation, computation alone and bound as lines."""
    rows = comparable_rows(run.summary)
    shown = [row for row in rows if is_measured(row)]
    if not shown:
        return None
    links = sorted({row.link for row in shown}, key=link_order)
    names = sorted({row.implementation for row in rows}, key=implementation_order)
    modes = {row.implementation: row.mode for row in rows}
    limits = {link: _limits(run.summary, shown, link) for link in links}
    legend = []
    if any(local is not None for local, _ in limits.values()):
        legend.append(Line2D([], [], label="computation alone (local)", **_LOCAL_LINE))
    if any(bound is not None for _, bound in limits.values()):
        legend.append(Line2D([], [], label="ideal bound", **_BOUND_LINE))
    columns, lines = _grid(len(links))
    figure = new_page(
        (max(7.0, 2.2 + 3.1 * columns), lines * (1.15 + 0.3 * len(names))),
        "Step time by link",
        describe(run.summary),
        [
            "Median of the timed steps; whiskers from the lower to the upper quartile. Each panel has its own scale. "
            + _REACHED,
            _CAPS if len({row.bucket_cap_mb for row in rows}) > 1 else "",
            failed_note(rows),
        ],
        legend,
    )
    panels = _panels(figure, lines, columns, len(links), sharey=True)
    for i, (axes, link) in enumerate(zip(panels, links, strict=True)):
        _draw_bars(axes, names, [row for row in rows if row.link == link])
        _mark_limits(axes, *limits[link])
        axes.set_title(link_label(link, shown), fontsize=TEXT_SIZE + 1, fontweight="bold", loc="left")
        axes.set_xlabel("step time (ms)", fontsize=TEXT_SIZE)
        if i % columns == 0:
            axes.set_yticks(range(len(names)), [case_label(name, modes[name]) for name in names])
            emphasize_ours(axes.get_yticklabels())
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    return figure


def _draw_bars(axes: Axes, names: Sequence[str], rows: Sequence[SummaryRow]) -> None:
    users = users_among(names)
    longest = 0.0
    for position, name in enumerate(names):
        own = [row for row in rows if row.implementation == name]
        best = fastest(own)
        if best is not None:
            draw_step_bar(axes, best, position, 0.7, style_of(name, users).color)
            longest = max(longest, best.step_ms or 0.0, *best.quartiles_ms)
        elif own:
            axes.text(0, position, " failed", va="center", fontsize=SMALL_SIZE, fontstyle="italic", color="#888888")
    axes.set_xlim(0, 1.18 * longest)
    clean(axes, "x")
    axes.tick_params(axis="y", length=0)


def _mark_limits(axes: Axes, local_ms: float | None, bound_ms: float | None) -> None:
    if local_ms is not None:
        axes.axvline(local_ms, **_LOCAL_LINE)
    if bound_ms is not None:
        axes.axvline(bound_ms, **_BOUND_LINE)


def _limits(summary: Sequence[SummaryRow], shown: Sequence[SummaryRow], link: str) -> tuple[float | None, float | None]:
    """Milliseconds of computation alone on a link, and the lowest bound of the rows that are shown for it."""
    alone = [row for row in summary if row.implementation == LOCAL and row.link == link]
    modes = headline_modes((row.implementation, row.mode) for row in alone)
    fewest = shown[0].no_sync_every or 1
    local = fastest(row for row in alone if row.mode == modes[LOCAL] and (row.no_sync_every or 1) == fewest)
    bounds = [row.bound_ms for row in shown if row.link == link and row.bound_ms is not None]
    return None if local is None else local.step_ms, min(bounds, default=None)


def build_bucket_cap_sweep(run: BenchmarkRun) -> Figure | None:
    """A panel for each link with at least two capacities: step time against capacity, a line per implementation.

    Source: Figures 7 and 8 of Li et al., "PyTorch Distributed", VLDB 2020.
    """
    rows = [row for row in comparable_rows(run.summary) if row.bucket_cap_mb is not None]
    shown = [row for row in rows if is_measured(row)]
    links = [
        link
        for link in sorted({row.link for row in shown}, key=link_order)
        if len({row.bucket_cap_mb for row in shown if row.link == link}) > 1
    ]
    if not links:
        return None
    columns, lines = _grid(len(links))
    figure = new_page(
        (max(7.0, 2.6 + 3.4 * columns), 3.6 * lines),
        "Step time against bucket capacity",
        describe(run.summary),
        [
            "Median of the timed steps; bands from the lower to the upper quartile. Each panel has its own "
            "scale, which does not begin at zero. " + _REACHED,
            failed_note(rows),
        ],
    )
    panels = _panels(figure, lines, columns, len(links), sharey=False)
    users = users_among(row.implementation for row in shown)
    drawn: dict[str, Line2D] = {}
    for axes, link in zip(panels, links, strict=True):
        drawn |= _draw_sweep(axes, [row for row in shown if row.link == link], users)
        axes.set_title(link_label(link, shown), fontsize=TEXT_SIZE + 1, fontweight="bold", loc="left")
    put_legend(panels[columns - 1], handles=[drawn[name] for name in sorted(drawn, key=implementation_order)])
    return figure


def _draw_sweep(axes: Axes, rows: Sequence[SummaryRow], users: Sequence[str]) -> dict[str, Line2D]:
    """Returns the line of each implementation."""
    drawn = {}
    caps = sorted({row.bucket_cap_mb for row in rows if row.bucket_cap_mb is not None})
    # Ours last, so that they are on top.
    for name in sorted({row.implementation for row in rows}, key=implementation_order, reverse=True):
        points = []
        for cap in caps:
            best = fastest(row for row in rows if row.implementation == name and row.bucket_cap_mb == cap)
            if best is not None and best.step_ms is not None:
                points.append((cap, best.step_ms, *best.quartiles_ms))
        x, y, low, high = zip(*points, strict=True)
        style = style_of(name, users)
        axes.fill_between(x, low, high, color=style.color, alpha=0.1, linewidth=0)
        label = case_label(name, next(row.mode for row in rows if row.implementation == name))
        (drawn[name],) = axes.plot(
            x, y, color=style.color, marker=style.marker, linewidth=style.width, markersize=5.5, label=label
        )
    axes.set_xscale("log")
    axes.set_xticks(caps, [f"{cap:g}" for cap in caps])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("bucket capacity (MiB)", fontsize=TEXT_SIZE)
    axes.set_ylabel("step time (ms)", fontsize=TEXT_SIZE)
    clean(axes, "both")
    return drawn


def _grid(num_panels: int) -> tuple[int, int]:
    """Columns and lines of panels."""
    columns = min(num_panels, _COLUMNS)
    return columns, math.ceil(num_panels / columns)


def _panels(figure: Figure, lines: int, columns: int, num_panels: int, *, sharey: bool) -> list[Axes]:
    grid = figure.subplots(lines, columns, sharey=sharey, squeeze=False)
    panels: list[Axes] = list(grid.flat)
    for axes in panels[num_panels:]:
        axes.remove()
    return panels[:num_panels]
