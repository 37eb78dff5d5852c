"""How all charts look: colors, page, title and notes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

from ddp_compile.bench.charts.choice import PEERS, failures, link_name, link_order, unique
from ddp_compile.bench.charts.data_files import SummaryRow
from ddp_compile.bench.implementations import COMMUNICATION, LOCAL, OURS_PREFIX

DPI = 120
TEXT_SIZE = 9.5
SMALL_SIZE = 8.5
DARK = "#333333"
GRID = "#e3e3e3"
_TITLE_SIZE = 14
_LINE_IN = 0.175
_LONGEST_LABEL = 34

# Ours are warm, peers are muted and cold, a user's own are green.
_OURS = {
    **{"auto": "#c1121f", "forward": "#f07f13", "backward": "#8e1b4d", "none": "#f5b041"},
    **{"bfloat16": "#e4572e", "float16": "#b0413e", "byte-grad": "#6a040f"},
}
_OURS_MARKERS = {
    "auto": "o",
    "forward": "s",
    "backward": "D",
    "none": "^",
    "bfloat16": "h",
    "float16": "8",
    "byte-grad": "p",
}
_PEER_COLORS = ("#4d5b6a", "#4f86b8", "#8fb8d6", "#8a83b5", "#b3b3b3", "#8c8a6b", "#5f8f8b")
_PEER_MARKERS = ("v", "X", "P", "<", ">", "d", "H")
_USER_COLORS = ("#2a9d6f", "#74b72e", "#136f63")


class Style(NamedTuple):
    """Color, marker and width in points of an implementation's line."""

    color: str
    marker: str
    width: float


def style_of(implementation: str, users: Sequence[str] = ()) -> Style:
    """The style of an implementation, the same in every chart.

    Args:
        implementation: Its name.
        users: A user's own implementations, which get their colors in this order.
    """
    if implementation.startswith(OURS_PREFIX):
        split = implementation.removeprefix(OURS_PREFIX)
        return Style(_OURS.get(split, "#a8324a"), _OURS_MARKERS.get(split, "*"), 2.2)
    if implementation in PEERS:
        i = PEERS.index(implementation)
        return Style(_PEER_COLORS[i % len(_PEER_COLORS)], _PEER_MARKERS[i % len(_PEER_MARKERS)], 1.3)
    if implementation in (LOCAL, COMMUNICATION):
        return Style(DARK, ".", 1.3)
    i = users.index(implementation) if implementation in users else 0
    return Style(_USER_COLORS[i % len(_USER_COLORS)], "h", 1.8)


def users_among(implementations: Iterable[str]) -> list[str]:
    """A user's own implementations, sorted."""
    known = (*PEERS, LOCAL, COMMUNICATION)
    return sorted({name for name in implementations if name not in known and not name.startswith(OURS_PREFIX)})


def link_colors(links: Iterable[str]) -> dict[str, str]:
    """From light to dark by rate; black for links without one."""
    ordered = sorted(set(links), key=link_order)
    rated = [link for link in ordered if link_order(link)[0] == 0]
    shades = colormaps["viridis_r"]
    colors: dict[str, Any] = {link: shades(0.15 + 0.8 * i / max(1, len(rated) - 1)) for i, link in enumerate(rated)}
    return colors | {link: "black" for link in ordered if link not in colors}


def short(name: str) -> str:
    """A label of bounded length; the end of a long ``module:function``."""
    return name if len(name) <= _LONGEST_LABEL else "…" + name[1 - _LONGEST_LABEL :].lstrip(".")


def case_label(implementation: str, mode: str) -> str:
    return short(implementation) if mode in ("default", "") else f"{short(implementation)} ({mode})"


def link_label(link: str, rows: Iterable[SummaryRow] = ()) -> str:
    """A link's name in words, with the rate that was reached, if a row has it."""
    label = link_name(link)
    measured = sorted({row.achieved_gbit for row in rows if row.link == link and row.achieved_gbit is not None})
    return f"{label} ({measured[len(measured) // 2]:.3g} Gbit/s)" if measured else label


def describe(summary: Sequence[SummaryRow]) -> str:
    """Model, parameters, ranks, device and torch of a run, in one line."""
    parameters = unique(_count(row.parameters) for row in summary if row.parameters is not None)
    ranks = unique(f"{row.world_size:.0f}" for row in summary if row.world_size is not None)
    parts = [
        ", ".join(unique(row.model for row in summary if row.model)),
        f"{' or '.join(parameters)} parameters" if parameters else "",
        f"{' or '.join(ranks)} ranks" if ranks else "",
        ", ".join(unique(row.device for row in summary if row.device)),
        ", ".join(unique(f"torch {row.torch}" for row in summary if row.torch)),
    ]
    return "  ·  ".join(part for part in parts if part)


def new_page(
    size: tuple[float, float],
    title: str,
    subtitle: str,
    notes: Iterable[str],
    legend: Sequence[Artist] = (),
) -> Figure:
    """A figure with its title above the panels and its notes below them.

    Args:
        size: Width and height in inches, without title and notes.
        title: What the chart shows.
        subtitle: The model and the machine.
        notes: Sentences; empty ones are left out.
        legend: Labeled entries for all panels, shown below the subtitle.
    """
    width, height = size
    per_line = int(width * 15)
    above = textwrap.wrap(subtitle, int(width * 13))
    below = [line for note in notes if note for line in textwrap.wrap(note, per_line)]
    header = 0.5 + _LINE_IN * len(above) + (0.27 if legend else 0.0)
    footer = 0.1 + _LINE_IN * len(below)
    total = height + header + footer
    figure = Figure(figsize=(width, total), dpi=DPI, facecolor="white")
    figure.set_layout_engine(
        ConstrainedLayoutEngine(rect=(0.008, footer / total, 0.984, height / total), w_pad=0.06, h_pad=0.06)
    )
    left = 0.12 / width
    figure.text(left, 1 - 0.12 / total, title, va="top", fontsize=_TITLE_SIZE, fontweight="bold", color="black")
    figure.text(left, 1 - 0.4 / total, "\n".join(above), va="top", fontsize=TEXT_SIZE, color=DARK)
    figure.text(left, 0.09 / total, "\n".join(below), va="bottom", fontsize=SMALL_SIZE, color=DARK)
    if legend:
        figure.legend(
            handles=legend,
            loc="upper left",
            bbox_to_anchor=(left, 1 - (header - 0.31) / total),
            ncols=len(legend),
            frameon=False,
            fontsize=TEXT_SIZE,
            borderaxespad=0.0,
            borderpad=0.0,
        )
    return figure


def failed_note(rows: Iterable[SummaryRow]) -> str:
    """ "failed: a, b (1gbit)", or "" if nothing failed."""
    found = [short(name) + (f" ({', '.join(where)})" if where else "") for name, where in failures(rows)]
    return f"failed: {', '.join(found)}" if found else ""


def clean(axes: Axes, grid: str) -> None:
    """Draw only the lines that help reading.

    Args:
        axes: A panel.
        grid: Axis with grid lines: "x", "y" or "both".
    """
    axes.set_axisbelow(True)
    axes.grid(True, axis=grid, color=GRID, linewidth=0.8)  # type: ignore[arg-type]
    axes.tick_params(labelsize=TEXT_SIZE, color="#999999")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")


def draw_step_bar(axes: Axes, row: SummaryRow, position: float, height: float, color: str) -> None:
    """A horizontal bar from zero to a measured step time, with its quartiles and its value in milliseconds."""
    if row.step_ms is None:
        return
    low, high = row.quartiles_ms
    axes.barh(position, row.step_ms, height=height, color=color)
    axes.hlines(position, low, high, color="black", linewidth=1.2)
    axes.vlines([low, high], position - 0.25 * height, position + 0.25 * height, color="black", linewidth=1.2)
    text = f"{row.step_ms:.0f}" if row.step_ms >= 100 else f"{row.step_ms:.3g}"
    write_beside(axes, text, max(high, row.step_ms), position)


def write_beside(axes: Axes, text: str, x: float, y: float) -> None:
    """Text to the right of a bar's end, readable across a line as well."""
    axes.annotate(
        text,
        (x, y),
        xytext=(4.5, 0),
        textcoords="offset points",
        va="center",
        fontsize=SMALL_SIZE,
        color=DARK,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
        zorder=4,
    )


def emphasize_ours(labels: Iterable[Text]) -> None:
    """Make our own names in tick labels or a legend stand out."""
    for label in labels:
        if label.get_text().startswith(OURS_PREFIX):
            label.set_fontweight("bold")
            label.set_color(_OURS["auto"])


def color_of_name(implementation: str) -> str:
    """The color of a name; ours stand out."""
    return _OURS["auto"] if implementation.startswith(OURS_PREFIX) else "black"


def put_legend(axes: Axes, title: str | None = None, handles: Sequence[Artist] | None = None) -> None:
    """A legend to the right of a panel, where it covers no data.

    Args:
        axes: The panel.
        title: What the entries are.
        handles: Labeled entries; the panel's own when None.
    """
    legend = axes.legend(
        handles=axes.get_legend_handles_labels()[0] if handles is None else handles,
        loc="upper left",
        bbox_to_anchor=(1.02, 1.0),
        frameon=False,
        fontsize=TEXT_SIZE,
        title=title,
        title_fontsize=TEXT_SIZE,
        alignment="left",
    )
    emphasize_ours(legend.get_texts())


def _count(parameters: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit}"
    return f"{parameters:.0f}"
