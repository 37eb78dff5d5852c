"""What an all-reduce of a given size takes on each link."""

from __future__ import annotations

from collections.abc import Sequence

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


def build_message_size(run: BenchmarkRun) -> Figure | None:
    """All-reduce time and bandwidth against message size, a line per link.

    Source: Figure 2 of Li et al., "PyTorch Distributed", VLDB 2020.
    """
    rows = [row for row in run.messages if row.message_bytes and row.all_reduce_ms]
    if not rows:
        return None
    links = sorted({row.link for row in rows}, key=link_order)
    colors = link_colors(links)
    figure = new_page(
        (11.0, 4.0),
        "All-reduce by message size",
        describe(run.summary),
        ["Medians; bands from the lower to the upper quartile. Dotted: the rate of the link."],
    )
    times, bandwidths = figure.subplots(1, 2)
    for link in links:
        _draw_link(times, bandwidths, link, [row for row in rows if row.link == link], colors[link])
        rate = gbit_of(link)
        if rate is not None:
            bandwidths.axhline(rate, color=colors[link], linestyle=":", linewidth=1.2)
    for axes, label in ((times, "time of one all-reduce (ms)"), (bandwidths, "message size / time (Gbit/s)")):
        _scale(axes)
        axes.set_ylabel(label, fontsize=TEXT_SIZE)
    put_legend(bandwidths, "link")
    return figure


def _draw_link(times: Axes, bandwidths: Axes, link: str, rows: Sequence[MessageRow], color: str) -> None:
    points = sorted(
        (
            row.message_bytes,
            row.all_reduce_ms,
            row.all_reduce_ms_p25 or row.all_reduce_ms,
            row.all_reduce_ms_p75 or row.all_reduce_ms,
        )
        for row in rows
        if row.message_bytes and row.all_reduce_ms
    )
    sizes, medians, low, high = zip(*points, strict=True)
    times.fill_between(sizes, low, high, color=color, alpha=0.2, linewidth=0)
    for axes, values in ((times, medians), (bandwidths, list(map(_gbit, sizes, medians)))):
        axes.plot(sizes, values, color=color, marker="o", markersize=4, linewidth=1.8, label=link_label(link))
    bandwidths.fill_between(
        sizes, list(map(_gbit, sizes, high)), list(map(_gbit, sizes, low)), color=color, alpha=0.2, linewidth=0
    )


def _gbit(num_bytes: float, ms: float) -> float:
    return num_bytes * 8 / (ms * 1e6)


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
