"""A report as one HTML page. It loads nothing, so it can be mailed and read offline."""

from collections.abc import Iterator
from html import escape
from pathlib import Path

from ddp_compile.errors import number_of, shorten_names
from ddp_compile.report.advice import FEWEST_STEPS, advise, least_seconds, shorten
from ddp_compile.report.spans import spans_of
from ddp_compile.report.steps import MeasuredSteps, Step, format_ms
from ddp_compile.report.timeline import BACKWARD, BUCKETS, EXPOSED, FORWARD, LATE, LAUNCH, render_timeline
from ddp_compile.report.timing import median_step, median_times, median_totals

_STYLE = f"""
:root{{color-scheme:light dark;--page:#fff;--text:#1f2328;--soft:#656d76;--line:#d8dee4;--panel:#f6f8fa;
--exposed:{EXPOSED};--late:{LATE};--launch:{LAUNCH};--forward:{FORWARD};--backward:{BACKWARD}}}
@media (prefers-color-scheme:dark){{:root{{--page:#16181d;--text:#e6e8eb;--soft:#9aa3ad;--line:#343a42;--panel:#1e2127;
--forward:#56728b}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:1240px;padding:24px 20px 48px;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,sans-serif}}
h1{{font-size:22px;margin:0 0 4px}}
h2{{font-size:17px;margin:30px 0 8px}}
p,ul{{margin:6px 0}}
ul{{padding-left:20px}}
.soft,caption{{color:var(--soft);font-size:13px}}
.summary{{font-size:16px;background:var(--panel);border:1px solid var(--line);border-radius:6px;padding:10px 14px}}
.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%;font-size:14px}}
caption{{caption-side:bottom;text-align:left;padding-top:6px}}
th,td{{text-align:right;padding:4px 10px;border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums;
white-space:nowrap}}
th{{color:var(--soft);font-weight:600}}
td.names,th.names{{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:130px}}
td.high{{color:var(--exposed);font-weight:700}}
i{{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:7px;vertical-align:-1px}}
.legend{{display:flex;flex-wrap:wrap;gap:4px 20px;margin:8px 0;font-size:13px;color:var(--soft)}}
svg{{display:block;width:100%;min-width:860px;font:12px system-ui,sans-serif}}
svg text{{fill:var(--text)}}
svg .axis{{fill:var(--soft);text-anchor:middle}}
svg .in{{fill:#fff;text-anchor:middle;pointer-events:none}}
i.dashes{{border-top:2px dashed var(--soft);height:0;vertical-align:4px}}
svg text.late{{fill:var(--text);font-weight:700}}
svg path.late{{stroke:var(--late);stroke-width:3}}
svg .grid{{stroke:var(--line)}}
.launch{{fill:var(--launch);background:var(--launch)}}
.late{{fill:var(--late);background:var(--late)}}
svg .queue{{stroke:var(--soft);stroke-width:1.4;stroke-dasharray:2 2}}
.forward{{fill:var(--forward);background:var(--forward)}}
.backward,.computation{{fill:var(--backward);background:var(--backward)}}
.wait{{fill:var(--exposed);background:var(--exposed)}}
svg rect{{height:16px}}
pre{{overflow-x:auto;font-size:13px}}
"""
_STYLE += "".join(f".b{i}{{--own:{color};fill:var(--own);background:var(--own)}}" for i, color in enumerate(BUCKETS))
_STYLE += ".gather{--pale:color-mix(in srgb,var(--own) 55%,var(--page));fill:var(--pale);background:var(--pale)}"

#: What is in the picture, how it looks, and what that means.
_LEGEND = (
    ("forward", 'class="forward"', "forward"),
    ("backward", 'class="backward"', "backward"),
    ("computation", 'class="computation"', "computation"),
    ("launch", 'class="launch"', "launch that took long"),
    ("wait", 'class="wait"', "exposed: waits for this bucket"),
    ("late", 'class="late"', "waits for a late rank"),
    ("transfer", 'class="b0"', "transfer, with the number of its bucket"),
    ("gather", 'class="b0 gather"', "gather of updated parameters"),
    ("queue", 'class="dashes"', "launched, not moving yet"),
)


def write(report: MeasuredSteps, path: Path) -> None:
    path.write_text(render_page(report), encoding="utf-8")


def render_page(report: MeasuredSteps) -> str:
    """The page as text. Names that a user chose are escaped."""
    title = f"{escape(shorten(report.model))}: {number_of(len(report.steps), 'step')} measured"
    step = median_step(report.steps)
    body = [
        f"<h1>{title}</h1>",
        f'<p class="soft">{escape(_setting(report))}</p>',
        f'<p class="summary">{_headline(report)}</p>',
        "<h2>What to look at</h2>",
        *_advice(report),
        *_timeline(report, step),
        "<h2>Buckets</h2>",
        *_table(report),
    ]
    if report.explanation is not None:
        body += ["<h2>Plan and graphs</h2>", f"<pre>{escape(str(report.explanation))}</pre>"]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def _headline(report: MeasuredSteps) -> str:
    """The medians of all steps, and the bucket with the longest exposed time of the table."""
    least_s, times = least_seconds(report), median_times(report.steps)
    shown = {
        name: time
        for name, time in median_totals(report.steps).items()
        if name != "launching" or (time or 0) >= least_s
    }
    parts = [f"{'step' if name == 'all' else name} {format_ms(time)}" for name, time in shown.items()]
    (_, bucket), longest = max(times.items(), key=lambda item: item[1].exposed_s, default=(("", 0), None))
    where = f" (most in bucket {bucket})" if longest is not None and longest.exposed_s >= least_s else ""
    return f"Medians of {number_of(len(report.steps), 'step')}: {', '.join(parts)}{where}"


def _setting(report: MeasuredSteps) -> str:
    ranks = number_of(len(report.steps[0].ranks), "rank")
    return (
        f"{ranks} on {report.device}, algorithm {report.algorithm}, {number_of(len(report.buckets), 'bucket')}, "
        f"plan {report.plan.digest}; the clocks differ by at most {format_ms(report.clock_error_s)}"
    )


def _advice(report: MeasuredSteps) -> Iterator[str]:
    found = advise(report)
    if found:
        yield (
            "<ul>"
            + "".join(f"<li>{escape(advice.text[0].upper() + advice.text[1:])}.</li>" for advice in found)
            + "</ul>"
        )
    elif len(report.steps) < FEWEST_STEPS:
        yield f"<p>Fewer than {FEWEST_STEPS} steps were measured, which is too few for advice.</p>"
    else:
        least = format_ms(least_seconds(report))
        yield f"<p>In the median, no bucket is exposed for {least}, and no rank is that late.</p>"


def _timeline(report: MeasuredSteps, step: Step) -> Iterator[str]:
    yield f"<h2>Timeline of step {step.number}, the one of median length</h2>"
    spans = [span for own in spans_of(step).values() for span in own]
    shown: set[str] = {span.name if span.lane == "computation" else span.lane for span in spans}
    if any(span.lane == "transfer" and span.transfer is not None and span.transfer.kind == "gather" for span in spans):
        shown.add("gather")
    words = "".join(f"<span><i {look}></i>{text}</span>" for name, look, text in _LEGEND if name in shown)
    yield f'<div class="legend">{words}</div>'
    yield f'<div class="scroll">{render_timeline(step, least_seconds(report))}</div>'
    if report.unknown_ends:
        yield f'<p class="soft">{report.unknown_ends} Transfers with an unknown end are not drawn.</p>'
    if step.drained_s >= least_seconds(report):
        yield (
            f'<p class="soft">A rank also waited up to {format_ms(step.drained_s)} for the algorithm as a whole rather '
            "than for one bucket; the timeline shows that as computation.</p>"
        )


def _cell(seconds: float | None) -> str:
    return f"<td>{'unknown' if seconds is None else f'{1e3 * seconds:.1f}'}</td>"


def _table(report: MeasuredSteps) -> Iterator[str]:
    times = median_times(report.steps)
    least_s = least_seconds(report)
    with_gathers = any(kind == "gather" for kind, _ in times)
    kind_head = "<th>transfer of</th>" if with_gathers else ""
    yield (
        '<div class="scroll"><table><thead><tr><th>bucket</th><th class="names">parameters</th>'
        f"{kind_head}<th>MiB</th><th>ready</th><th>launched</th><th>transfer</th><th>exposed</th></tr></thead><tbody>"
    )
    for bucket in report.buckets:
        names = escape(shorten_names([shorten(gradient.fqn) for gradient in bucket.gradients]))
        for (kind, index), own in times.items():
            if index == bucket.index:
                what = f"<td>{'gradients' if kind == 'reduce' else 'parameters'}</td>" if with_gathers else ""
                high = ' class="high"' if own.exposed_s >= least_s else ""
                figures = (own.ready, own.launched, own.transfer_s)
                yield (
                    f'<tr><td><i class="b{index % len(BUCKETS)}"></i>{index}</td>'
                    f'<td class="names">{names}</td>{what}<td>{bucket.num_bytes / 2**20:.3g}</td>'
                    f"{''.join(map(_cell, figures))}"
                    f"<td{high}>{1e3 * own.exposed_s:.1f}</td></tr>"
                )
    yield (
        "</tbody></table></div><p class='soft'>Milliseconds, medians of the steps. Ready and launched: on the last "
        "rank, since the step began. Transfer: while data moved. Exposed: the longest that a rank waited for the "
        "transfer. Both leave out waits for late ranks.</p>"
    )
