"""The timeline of a step as SVG: two rows for each rank, computation with its waits above transfers."""

import math
from collections.abc import Callable
from html import escape

from ddp_compile.report.spans import Span, spans_of
from ddp_compile.report.steps import Step, format_ms

# Colors that can be told apart on a light and on a dark background.
#: Waits for transfers; no bucket has a color like it.
EXPOSED = "#e5484d"
#: Launches that took long.
LAUNCH = "#8b949e"
#: Waits for late ranks.
LATE = "#e3b341"
FORWARD = "#8fb0cc"
BACKWARD = "#4f86b8"
#: Of buckets; those that are ten apart share one. Neighbors differ in hue, and all have about the same luminance.
BUCKETS = (
    *("#2f7fd6", "#b8720a", "#0f8f7c", "#9461d6", "#7a8519", "#c653a4"),
    *("#1f8fb5", "#a3704a", "#3a9440", "#6c70d4"),
)

_WIDTH = 1180
_LEFT = 112
_ROW = 17
_LANE = 2 * _ROW + 14
_TOP = 6


def render_timeline(step: Step, least_s: float) -> str:
    """The timeline as an ``<svg>`` element, without text that a user chose; marks ranks late by ``least_s`` or more."""
    spans = spans_of(step)
    begin = min(0.0, *(span.begin for own in spans.values() for span in own))
    end = max(span.end for own in spans.values() for span in own)
    per_second = (_WIDTH - _LEFT - 8) / max(end - begin, 1e-9)

    def x_of(seconds: float) -> float:
        return _LEFT + (seconds - begin) * per_second

    bottom = _TOP + _LANE * len(spans)
    late = {rank: late_s for rank in spans if (late_s := step.lateness_s(rank)) >= max(least_s, 1e-9)}
    parts = [_grid(x_of, begin, end, bottom)]
    for i, (rank, own) in enumerate(spans.items()):
        parts.append(_lane(rank, own, _TOP + _LANE * i, x_of, late.get(rank)))
    label = f"Timeline of step {step.number}, one lane for each of {len(spans)} ranks"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {bottom + 24}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _grid(x_of: Callable[[float], float], begin: float, end: float, bottom: float) -> str:
    """Vertical lines at round times, labeled below."""
    about = (end - begin) / 9
    power = 10.0 ** math.floor(math.log10(about)) if about > 0 else 1.0
    apart = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= about)
    parts = []
    for i in range(math.ceil(begin / apart - 1e-9), math.floor(end / apart + 1e-9) + 1):
        x = f"{x_of(i * apart):.1f}"
        unit = " ms" if i == 0 else ""
        parts.append(
            f'<path class="grid" d="M{x} {_TOP}V{bottom}"/>'
            f'<text class="axis" x="{x}" y="{bottom + 15}">{1e3 * i * apart:g}{unit}</text>'
        )
    return "".join(parts)


def _lane(rank: int, spans: list[Span], top: float, x_of: Callable[[float], float], late_s: float | None) -> str:
    queue: list[str] = []
    upper: list[str] = []
    lower: list[str] = []
    for span in spans:
        begin, end = x_of(span.begin), x_of(span.end)
        left, width = f"{begin:.1f}", f"{max(end - begin, 0.6):.1f}"  # wide enough to see
        if span.lane == "queue":
            queue.append(f"M{left} {_ROW + _ROW // 2}h{width}")
            continue
        row, look, number = upper, span.name if span.lane == "computation" else span.lane, ""
        if span.transfer is not None and span.lane in ("transfer", "wait"):
            number = str(span.transfer.bucket)
        if span.transfer is not None and span.lane == "transfer":
            row, look = lower, f"b{span.transfer.bucket % len(BUCKETS)} {span.transfer.kind}"
        title = f"<title>{span.name}, {format_ms(span.end - span.begin)}</title>"
        row.append(f'<rect class="{look}" x="{left}" width="{width}">{title}</rect>')
        if number and float(width) >= 7 + 6 * len(number):
            row.append(f'<text class="in" x="{float(left) + float(width) / 2:.0f}" y="12">{number}</text>')
    parts = [f'<g transform="translate(0 {top})"><text y="13">rank {rank}</text>']
    if late_s is not None:
        parts.append(f'<text class="late" y="{13 + _ROW}">late by {format_ms(late_s)}</text>')
        parts.append(f'<path class="late" d="M{_LEFT - 7} 0v{2 * _ROW - 1}"/>')
    parts.append(f'<path class="queue" d="{"".join(queue)}"/>' if queue else "")
    return "".join([*parts, *upper, f'<g transform="translate(0 {_ROW})">', *lower, "</g></g>"])
