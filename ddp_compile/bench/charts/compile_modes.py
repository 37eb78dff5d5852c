"""Compile times and step times of the modes of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ddp_compile.bench.charts.appearance import (
    TEXT_SIZE,
    clean,
    describe,
    draw_step_bar,
    emphasize_ours,
    failed_note,
    link_label,
    new_page,
    put_legend,
    short,
    write_beside,
)
from ddp_compile.bench.charts.choice import (
    fastest,
    implementation_order,
    is_measured,
    link_order,
    mode_order,
    with_fewest_micro_batches,
)
from ddp_compile.bench.charts.data_files import BenchmarkRun, SummaryRow
from ddp_compile.bench.implementations import COMMUNICATION

_COLORS = ("#2a6f97", "#e09f3e", "#7b5ea7", "#5f8d4e", "#9c4a4a")
_PALE = 0.35
_HEIGHT = 0.88
_GAP = 0.6


def build_compile_modes(run: BenchmarkRun) -> Figure | None:
    """Step time, and next to it cold and warm compile seconds, of each implementation in each mode."""
    rows = [row for row in run.summary if row.implementation != COMMUNICATION]
    if not any(row.cold_compile_s is not None or row.warm_compile_s is not None for row in rows if is_measured(row)):
        return None
    rows = with_fewest_micro_batches(rows)
    link = _link_with_most_modes(rows)
    rows = [row for row in rows if row.link == link]
    chosen = _fastest_of_each(rows)
    names = sorted({row.implementation for row in chosen}, key=implementation_order)
    modes = sorted({row.mode for row in chosen}, key=mode_order)
    placed, middles = _positions(chosen, names)
    colors = {mode: _COLORS[i % len(_COLORS)] for i, mode in enumerate(modes)}
    figure = new_page(
        (11.5, max(2.6, 1.0 + 0.235 * placed[-1][1])),
        "Modes of torch.compile",
        describe(run.summary),
        [
            f"Link: {link_label(link)}. Median step time, whiskers from the lower to the upper quartile; the fastest "
            "bucket capacity where several were run.",
            failed_note(rows),
        ],
    )
    steps, compiles = figure.subplots(1, 2, sharey=True)
    for row, position in placed:
        draw_step_bar(steps, row, position, _HEIGHT, colors[row.mode])
        _draw_compile(compiles, row, position, colors[row.mode])
    steps.set_yticks(middles, [short(name) for name in names])
    steps.set_ylim(placed[-1][1] + 0.7, -0.7)
    emphasize_ours(steps.get_yticklabels())
    for axes, label in ((steps, "step time (ms)"), (compiles, "compile time (s)")):
        clean(axes, "x")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(label, fontsize=TEXT_SIZE)
    steps.set_xlim(0, 1.18 * max(row.quartiles_ms[1] for row in chosen))
    compiles.set_xlim(0, 1.25 * max(max(row.cold_compile_s or 0.0, row.warm_compile_s or 0.0) for row in chosen) or 1.0)
    _explain(compiles, colors)
    return figure


def _link_with_most_modes(rows: Sequence[SummaryRow]) -> str:
    """The link with the most modes. Of several, the fastest, where communication hides the least."""
    modes: dict[str, set[tuple[str, str]]] = {}
    for row in rows:
        if is_measured(row):
            modes.setdefault(row.link, set()).add((row.implementation, row.mode))
    compiled = {row.link for row in rows if row.cold_compile_s is not None or row.warm_compile_s is not None}
    return max(modes, key=lambda link: (link in compiled, len(modes[link]), link_order(link)))


def _fastest_of_each(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    groups: dict[tuple[str, str], list[SummaryRow]] = {}
    for row in rows:
        groups.setdefault((row.implementation, row.mode), []).append(row)
    return [best for group in groups.values() if (best := fastest(group)) is not None]


def _positions(rows: Sequence[SummaryRow], names: Sequence[str]) -> tuple[list[tuple[SummaryRow, float]], list[float]]:
    """Each row with the position of its bar, and the middle of each implementation's bars; bars are one apart."""
    placed: list[tuple[SummaryRow, float]] = []
    middles = []
    position = 0.0
    for name in names:
        own = sorted((row for row in rows if row.implementation == name), key=lambda row: mode_order(row.mode))
        placed += [(row, position + i) for i, row in enumerate(own)]
        middles.append(position + (len(own) - 1) / 2)
        position += len(own) + _GAP
    return placed, middles


def _draw_compile(axes: Axes, row: SummaryRow, position: float, color: str) -> None:
    cold, warm = row.cold_compile_s, row.warm_compile_s
    if cold is not None:
        axes.barh(position, cold, height=_HEIGHT, color=color, alpha=_PALE)
    if warm is not None:
        axes.barh(position, warm, height=0.5 * _HEIGHT, color=color)
    text = " / ".join("-" if seconds is None else f"{seconds:.3g}" for seconds in (cold, warm))
    if cold is None and warm is None:
        text = "not measured"
    write_beside(axes, text, max(cold or 0.0, warm or 0.0), position)


def _explain(axes: Axes, colors: dict[str, str]) -> None:
    entries = [Patch(color=color, label=mode) for mode, color in colors.items()]
    entries.append(Patch(color="#555555", alpha=_PALE, label="cold: empty caches"))
    entries.append(Patch(color="#555555", label="warm: caches filled"))
    put_legend(axes, "mode", entries)
