"""The timeline of one step as a PNG, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ddp_compile.report.advice import least_seconds
from ddp_compile.report.colors import BACKWARD, EXPOSED, FORWARD, LATE, LAUNCH, bucket_color
from ddp_compile.report.spans import Span, spans_of
from ddp_compile.report.steps import StepReport
from ddp_compile.report.text import format_step
from ddp_compile.report.timeline import format_ms
from ddp_compile.report.timing import median_step

_DPI = 120
_COMPUTATION = {"forward": FORWARD, "backward": BACKWARD, "computation": BACKWARD}
_WAITS = {"launch": LAUNCH, "late": LATE, "wait": EXPOSED}
#: A bar that is shorter than this share of the picture has no number in it.
_NARROWEST_NUMBER = 0.018


def draw_chart(report: StepReport, path: Path) -> None:
    """Draw the step of median length, one lane for each rank.

    Args:
        report: What was measured.
        path: Where to write the PNG.
    """
    step = median_step(report.steps)
    spans, least_s = spans_of(step), max(least_seconds(report), 1e-9)
    figure = Figure(figsize=(11, 1.5 + 0.5 * len(spans)), dpi=_DPI, facecolor="white", layout="constrained")
    axes = figure.subplots()
    labels = []
    for i, (rank, own) in enumerate(spans.items()):
        late_s = step.lateness_s(rank)
        labels.append(f"rank {rank}" + (f"\nlate by {format_ms(late_s)}" if late_s >= least_s else ""))
        _draw_lane(axes, i, own, _NARROWEST_NUMBER * step.duration_s)
    axes.set_yticks(range(len(labels)), labels, fontsize=8.5)
    for label in axes.get_yticklabels():
        if "\n" in label.get_text():
            label.set_fontweight("bold")
    axes.set_ylim(len(spans) - 0.45, -0.55)
    axes.margins(x=0.005)
    axes.set_xlabel("milliseconds since the step began", fontsize=9)
    axes.grid(axis="x", color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="both", length=0, labelsize=8.5)
    title = f"{report.model}, step {step.number}: {format_step(step)}"
    axes.set_title(title, loc="left", fontsize=10, parse_math=False, wrap=True)
    looks = {
        "forward": FORWARD,
        "backward": BACKWARD,
        "exposed": EXPOSED,
        "waits for late ranks": LATE,
        "long launches": LAUNCH,
        "transfer, by bucket": bucket_color(0),
    }
    handles = [Patch(color=color, label=label) for label, color in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8.5)
    FigureCanvasAgg(figure).print_png(path)


def _draw_lane(axes: Axes, lane: int, spans: Sequence[Span], narrowest: float) -> None:
    """One artist for each row: thousands of them take half a minute."""
    queue = [(1e3 * span.begin, 1e3 * span.end) for span in spans if span.lane == "queue"]
    begins, ends = [begin for begin, _ in queue], [end for _, end in queue]
    axes.hlines([lane + 0.19] * len(queue), begins, ends, color="#777777", linestyle=":", linewidth=1, zorder=0.9)
    for row, names in ((lane - 0.19, ("computation", "launch", "late", "wait")), (lane + 0.19, ("transfer",))):
        shown = [span for span in spans if span.lane in names]
        bars = [(1e3 * span.begin, 1e3 * (span.end - span.begin)) for span in shown]
        axes.broken_barh(bars, (row - 0.18, 0.36), facecolors=list(map(_color, shown)), linewidth=0)
        for span, (begin, length) in zip(shown, bars, strict=True):
            if span.transfer is not None and span.lane in ("transfer", "wait") and span.end - span.begin >= narrowest:
                index = str(span.transfer.bucket)
                axes.text(begin + length / 2, row, index, color="white", fontsize=8, ha="center", va="center")


def _color(span: Span) -> tuple[float, float, float, float]:
    if span.lane != "transfer" or span.transfer is None:
        return to_rgba(_WAITS.get(span.lane) or _COMPUTATION[span.name])
    return to_rgba(bucket_color(span.transfer.bucket), 0.55 if span.transfer.kind == "gather" else 1.0)
