"""An `Explanation` as HTML: a fragment for other pages, and a page of its own. Both need nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ddp_compile.report.colors import bucket_color
from ddp_compile.report.explanation import BucketLaunch, Explanation, GraphExplanation, SourceLine

#: Everything is inside ``.explanation``, so that it changes nothing else of a page.
_STYLE = """
.explanation { --text: #1f2328; --faint: #59636e; --line: #d1d9e0; --ground: #ffffff; color: var(--text);
  background: var(--ground); color-scheme: light dark; font: 14px/1.5 system-ui, sans-serif; overflow: hidden;
  padding: 0 1em }
@media (prefers-color-scheme: dark) { .explanation { --text: #e6edf3; --faint: #9198a1; --line: #3d444d;
  --ground: #0d1117 } }
.explanation h2 { font-size: 1.25em; margin: 1.2em 0 0.4em } .explanation h3 { font-size: 1em; margin: 1em 0 0.3em }
.explanation .scrolls { overflow-x: auto } .explanation table { border-collapse: collapse }
.explanation th, .explanation td { border-bottom: 1px solid var(--line); padding: 0.2em 0.8em; text-align: left;
  vertical-align: top; white-space: normal }
.explanation .number { text-align: right; font-variant-numeric: tabular-nums }
.explanation td:last-child { min-width: 16em }
.explanation code { font-size: 0.92em } .explanation .faint { color: var(--faint) }
.explanation .bucket { border-radius: 3px; color: #ffffff; display: inline-block; margin: 1px; min-width: 1.6em;
  padding: 0 0.3em; text-align: center }
.explanation .parts { align-items: stretch; display: flex; flex-wrap: wrap; gap: 0.2em 0 }
.explanation .part { border: 1px solid var(--line); border-radius: 5px; max-width: 16em; overflow-wrap: anywhere;
  padding: 0.3em 0.6em }
.explanation .cut { align-self: center; color: var(--faint); padding: 0 0.4em }
"""


def format_fragment(explanation: Explanation) -> str:
    """An element with its style, for a page that has its own head.

    Args:
        explanation: What to show.
    """
    title = f"{explanation.model} on {explanation.world_size} rank{'' if explanation.world_size == 1 else 's'}"
    about = ", ".join([explanation.algorithm, *explanation.settings, f"plan {explanation.plan.digest}"])
    graphs = "".join(map(_graph, explanation.graphs))
    return (
        f"<style>{_STYLE}</style>\n<section class='explanation'>\n<h2>{escape(title)}</h2>\n<p>{escape(about)}</p>\n"
        f"{_plan(explanation)}\n{graphs}{_rest(explanation)}</section>\n"
    )


def format_page(explanation: Explanation) -> str:
    """A whole page, which loads nothing.

    Args:
        explanation: What to show.
    """
    return (
        "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width'>\n"
        f"<title>{escape(explanation.model)}: ddp_compile</title>\n"
        "<style>html { color-scheme: light dark } body { margin: 0 }\n"
        ".explanation { box-sizing: border-box; min-height: 100vh }</style>\n</head>\n<body>\n"
        f"{format_fragment(explanation)}</body>\n</html>\n"
    )


def _plan(explanation: Explanation) -> str:
    """The buckets in launch order."""
    names = ("bucket", "MiB", "dtype", "gradients", "from", "to", "frame", "launched early")
    rows = []
    for bucket, launch in zip(explanation.plan.buckets, explanation.launches, strict=True):
        ends = [f"<code>{escape(gradient.fqn)}</code>" for gradient in (bucket.gradients[0], bucket.gradients[-1])]
        owners = sorted({gradient.owner for gradient in bucket.gradients if gradient.owner is not None})
        count = f"{len(bucket.gradients)}{' sparse' if bucket.is_sparse else ''}"
        count += f", whole on ranks {', '.join(map(str, owners))}" if owners else ""
        rows.append(
            [
                *(_bucket(bucket.index), f"{bucket.num_bytes / 2**20:.2f}", escape(bucket.dtype), escape(count), *ends),
                "eager" if bucket.frame is None else str(bucket.frame),
                _launch(launch),
            ]
        )
    return _table(names, rows, numbers={1, 3})


def _launch(launch: BucketLaunch) -> str:
    return f"{'yes' if launch.is_early else '<b>no</b>'}<span class='faint'>, {escape(launch.when)}</span>"


def _graph(graph: GraphExplanation) -> str:
    """The partitions in the order of the forward, with the buckets whose parameters each of them reads."""
    how = "launched inside its backward" if graph.launches_in_backward else f"partitions: {len(graph.partitions)}"
    boxes = []
    for number, part in enumerate(graph.partitions):
        if part.first_node is not None:
            boxes.append("<span class='cut' title='cut'>✂</span>")
        cut = (
            "" if part.first_node is None else f"<br>from <code>{escape(part.first_node)}</code>{_source(part.source)}"
        )
        buckets = "".join(map(_bucket, part.buckets)) or "no bucket"
        boxes.append(f"<div class='part'><span class='faint'>{number}</span> {buckets}{cut}</div>")
    refusals = [
        (what, f"<code>{escape(each.node)}</code>", escape(each.reason) + _source(each.source))
        for what, refused in (("not cut in the forward", graph.not_cut), ("declined", graph.refusals))
        for each in refused
    ]
    table = _table(("", "at", "why"), refusals) if refusals else ""
    return f"<h3>graph {graph.number}: {how}</h3>\n<div class='parts'>{''.join(boxes)}</div>\n{table}"


def _rest(explanation: Explanation) -> str:
    """What runs eagerly, and why; regions, shards, and failures of the compiler."""
    eager = "".join(map(_bucket, explanation.in_no_graph))
    lines = [f"in no graph: {eager}"] if eager else []
    lines += [f"{escape(f'{each.what}: {each.reason}')}{_source(each.source)}" for each in explanation.breaks]
    lines += [escape(str(each)) for each in (*explanation.regions, *explanation.sharding)]
    lines += [escape(f"{failure.graph} runs eagerly: {failure.error}") for failure in explanation.failures]
    return f"<ul>\n{''.join(f'<li>{line}</li>' for line in lines)}\n</ul>\n" if lines else ""


def _bucket(index: int) -> str:
    return f"<span class='bucket' style='background: {bucket_color(index)}'>{index}</span>"


def _source(source: SourceLine | None) -> str:
    if source is None:
        return ""
    return f"<br><span class='faint'>{escape(str(source))}</span> <code>{escape(source.code)}</code>"


def _table(names: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """A table of cells that are HTML."""
    classes = [" class='number'" if column in set(numbers) else "" for column in range(len(names))]

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in zip(cells, classes, strict=True))

    body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<div class='scrolls'><table>\n<tr>{line(names, 'th')}</tr>\n{body}\n</table></div>\n"
