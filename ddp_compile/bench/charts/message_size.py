"""Time and rate of all-reduces by message size and link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from ddp_compile.bench.charts.appearance import (
    TEXT_SIZE,
    clean,
    describe,
    link_colors,
    link_label,
    new_page,
    put_legend,
)
from ddp_compile.bench.charts.choice import gbit_of, link_order
from ddp_compile.bench.charts.data_files import BenchmarkRun, MessageRow

_BUS = (
    "Bus bandwidth: what a ring sends from each of n ranks, 2 (n - 1) / n times the message, over its time. "
    "Dotted: the rate of the link."
)


class _Point(NamedTuple):
    """A median with its quartiles, at a message size in bytes."""

    num_bytes: float
    median: float
    low: float
    high: float


def build_message_size(run: BenchmarkRun) -> Figure | None:
    """All-reduce time and bus bandwidth against message size, a line per link.

    Messages do not say how many ranks exchanged them, but the summary does: without it, and for a single rank, which
    sends nothing, there is no bandwidth.

    Source: Figure 2 of Li et al., "PyTorch Distributed", VLDB 2020; "bus bandwidth" is that of NCCL's tests.
    """
    points = {link: _times(run.messages, link) for link in {row.link for row in run.messages}}
    links = sorted((link for link in points if points[link]), key=link_order)
    if not links:
        return None
    colors = link_colors(links)
    ranks = {row.link: row.world_size for row in run.summary if row.world_size is not None and row.world_size > 1}
    on_bus = [link for link in links if link in ranks]
    figure = new_page(
        (11.0 if on_bus else 6.5, 4.0),
        "All-reduce by message size",
        describe(run.summary),
        ["Medians; bands from the lower to the upper quartile." + (f" {_BUS}" if on_bus else "")],
    )
    panels: list[Axes] = list(figure.subplots(1, 2 if on_bus else 1, squeeze=False).flat)
    for link in links:
        _draw_line(panels[0], link, colors[link], points[link])
    for link in on_bus:
        _draw_line(panels[1], link, colors[link], [_on_bus(point, ranks[link]) for point in points[link]])
        rate = gbit_of(link)
        if rate is not None:
            panels[1].axhline(rate, color=colors[link], linestyle=":", linewidth=1.2)
    for axes, label in zip(panels, ("time of one all-reduce (ms)", "bus bandwidth (Gbit/s)"), strict=False):
        _scale(axes)
        axes.set_ylabel(label, fontsize=TEXT_SIZE)
    put_legend(panels[-1], "link", panels[0].get_lines())
    return figure


def _times(rows: Iterable[MessageRow], link: str) -> list[_Point]:
    """Milliseconds of each size that was measured, smallest first."""
    return sorted(
        _Point(
            row.message_bytes,
            row.all_reduce_ms,
            row.all_reduce_ms_p25 or row.all_reduce_ms,
            row.all_reduce_ms_p75 or row.all_reduce_ms,
        )
        for row in rows
        if row.link == link and row.message_bytes and row.all_reduce_ms
    )


def _on_bus(times: _Point, num_ranks: float) -> _Point:
    """Milliseconds as Gbit/s; the shortest time is the highest rate."""
    gbit = times.num_bytes * 2 * (num_ranks - 1) / num_ranks * 8 / 1e6
    return _Point(times.num_bytes, gbit / times.median, gbit / times.high, gbit / times.low)


def _draw_line(axes: Axes, link: str, color: str, points: Sequence[_Point]) -> None:
    sizes, medians, low, high = zip(*points, strict=True)
    axes.fill_between(sizes, low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(sizes, medians, color=color, marker="o", markersize=4, linewidth=1.8, label=link_label(link))


def _scale(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("message size", fontsize=TEXT_SIZE)
    clean(axes, "both")


def _size(num_bytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:.4g} B"
