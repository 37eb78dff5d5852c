"""Gradients that are ready, by time since the backward began."""

from __future__ import annotations

from matplotlib.figure import Figure

from ddp_compile.bench.charts.appearance import (
    TEXT_SIZE,
    case_label,
    clean,
    describe,
    failed_note,
    link_label,
    new_page,
    put_legend,
    style_of,
    users_among,
)
from ddp_compile.bench.charts.choice import Case, choose_cases
from ddp_compile.bench.charts.data_files import BenchmarkRun
from ddp_compile.bench.implementations import LOCAL


def build_gradient_ready(run: BenchmarkRun) -> Figure | None:
    """Cumulated MiB against milliseconds, a line per implementation."""
    points: dict[Case, list[tuple[float, float]]] = {}
    for row in run.ready:
        if row.ms is not None and row.ready_mib is not None:
            case = Case(row.implementation, row.mode, row.bucket_cap_mb, row.link)
            points.setdefault(case, []).append((row.ms, row.ready_mib))
    cases = choose_cases(list(points), run.summary)
    if not cases:
        return None
    on_link = [row for row in run.summary if row.link == cases[0].link]
    figure = new_page(
        (9.5, 4.4),
        "Gradients that are ready, by time since the backward began",
        describe(run.summary),
        [
            f"Link: {link_label(cases[0].link)}. One step of rank 0; a step up for each parameter.",
            failed_note(on_link),
        ],
    )
    axes = figure.subplots()
    users = users_among(case.implementation for case in cases)
    several_caps = len({case.bucket_cap_mb for case in cases if case.implementation != LOCAL}) > 1
    for case in reversed(cases):
        times, sizes = zip((0.0, 0.0), *sorted(points[case]), strict=True)
        style = style_of(case.implementation, users)
        label = case_label(case.implementation, case.mode)
        if several_caps and case.implementation != LOCAL and case.bucket_cap_mb is not None:
            label += f", {case.bucket_cap_mb:g} MiB"
        dashes = "--" if case.implementation == LOCAL else "-"
        axes.plot(times, sizes, dashes, drawstyle="steps-post", color=style.color, linewidth=style.width, label=label)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time since the backward began (ms)", fontsize=TEXT_SIZE)
    axes.set_ylabel("gradients ready (MiB, cumulated)", fontsize=TEXT_SIZE)
    clean(axes, "both")
    put_legend(axes, handles=axes.get_lines()[::-1])
    return figure
