"""Files of reports: the page is small, offline and escaped; the trace and the chart have what was measured."""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plans import gradients, plan_in_frames
from simulated_steps import MIB, Simulation, many_buckets, six_buckets

from ddp_compile.report.colors import BACKWARD, EXPOSED, FORWARD, LATE, LAUNCH, bucket_color
from ddp_compile.report.explanation import BucketLaunch, Explanation, GraphExplanation, Partition, SourceLine
from ddp_compile.report.page import render_page
from ddp_compile.report.spans import spans_of
from ddp_compile.report.steps import StepReport
from ddp_compile.report.timing import median_step

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Reads a page, of which every element has to be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_page_of_60_buckets_8_ranks_and_20_steps_is_small() -> None:
    text = render_page(replace(many_buckets(), explanation=explanation_of(60)))
    assert len(text.encode()) < 300_000
    assert text.count("after the backward of a partition") == 60
    page = Page(text)
    assert page.tags["tr"] == 1 + 2 * 60 + 1 + 60
    assert page.tags["rect"] > 8 * 2 * 60


def explanation_of(num_buckets: int) -> Explanation:
    """A part of the graph for each bucket, with a long line of the user's."""
    line = SourceLine(f"/home/someone/{'folder/' * 12}model.py", 1234, "y = attention(query, key, value, mask)" * 2)
    plan = plan_in_frames(gradients(*[1] * num_buckets), cap_bytes=1)
    assert len(plan.buckets) == num_buckets
    parts = tuple(Partition((index,), f"linear_{index}", line) for index in range(num_buckets))
    return Explanation(
        model="Model",
        world_size=8,
        algorithm="gradient all-reduce",
        settings=(),
        plan=plan,
        launches=tuple(BucketLaunch(index, True, "after the backward of a partition") for index in range(num_buckets)),
        graphs=(GraphExplanation(0, num_buckets, parts, False, (), ()),),
        regions=(),
        in_no_graph=(),
        breaks=(),
        sharding=(),
        failures=(),
    )


def test_cells_of_the_explanation_wrap_on_the_page() -> None:
    text = render_page(replace(six_buckets(), explanation=explanation_of(6)))
    page, own = text.split("class='explanation'", 1)[0].rsplit("<style>", 1)
    assert "white-space:nowrap" in page and "white-space: normal" in own  # that of the page is for numbers


def test_a_page_loads_nothing() -> None:
    text = render_page(six_buckets(late={1: 0.01}))
    assert re.findall(r"https?://[^\"']*", text) == ["http://www.w3.org/2000/svg"]
    assert re.findall(r"(?i)<(?:script|link|img|iframe|object)|@import|url\(|\ssrc=|\shref=", text) == []
    assert "prefers-color-scheme:dark" in text


def test_a_page_says_what_the_report_says() -> None:
    report = six_buckets(ranks=4, late={3: 0.012})
    words = Page(render_page(report)).words
    said = " ".join(words)
    for advice in report.advice():
        assert f"{advice.text[0].upper()}{advice.text[1:]}." in said
    assert "Step 10: compute 120 ms, communication 69 ms, exposed 43 ms (bucket 5), rank 3 late by 12 ms" in words
    assert "late by 12 ms" in words and words.count("rank 3") == 1
    row = words[words.index("embedding.weight, positions.weight, blocks.0.norm.weight, blocks.0.norm.bias") :][:6]
    assert row[1:] == ["40", "132.0", "132.0", "42.9", "42.9"]


def test_what_users_have_named_is_escaped() -> None:
    evil = "<script>alert('&\"')</script>"
    report = Simulation(
        model=evil, buckets=[([evil], MIB), ([f"{evil}{'x' * 1000}"], 9 * MIB)], ready=[0.1, 0.11]
    ).run()
    text = render_page(report)
    page = Page(text)
    assert "<script" not in text and "&lt;script&gt;" in text
    assert page.tags["script"] == 0 and max(map(len, page.words[-60:])) < 400
    assert evil in " ".join(page.words)


def test_spans_fill_the_step_and_tell_late_ranks_from_transfers() -> None:
    report = six_buckets(late={1: 0.012})
    step = median_step(report.steps)
    for rank, spans in spans_of(step).items():
        busy = sorted((span.begin, span.end) for span in spans if span.lane in ("computation", "late", "wait"))
        assert busy[0][0] == 0.0 and busy[-1][1] == step.of_rank(rank).ended
        assert all(end == pytest.approx(begin) for (_, end), (begin, _) in itertools.pairwise(busy))
        length = Counter[str]()
        for span in spans:
            length[span.lane] += span.end - span.begin  # type: ignore[assignment]
        assert length["late"] == pytest.approx(0.012 if rank == 0 else 0.0)
        assert length["wait"] == pytest.approx(step.exposed_s)
        assert length["transfer"] == pytest.approx(step.communication_s)


def test_long_launches_are_no_computation() -> None:
    report = six_buckets()
    (first, *_), own = report.steps[0].ranks, report.steps[0].ranks[0].transfers[0]
    slow = replace(own, launch_returned=own.launched + 0.004)
    ranks = (replace(first, transfers=(slow, *first.transfers[1:])), report.steps[0].ranks[1])
    changed = replace(report, steps=[replace(report.steps[0], ranks=ranks)])
    (launch,) = (span for span in spans_of(changed.steps[0])[0] if span.lane == "launch")
    assert launch.end - launch.begin == pytest.approx(0.004)
    assert "launch that took long" in render_page(changed)
    assert "launch that took long" not in render_page(report)


def test_colors_stand_out_on_light_and_dark() -> None:
    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    colors = {bucket_color(i) for i in range(60)}
    assert len(colors) == 10 and not colors & {EXPOSED, LATE, LAUNCH, FORWARD, BACKWARD}
    assert all(bucket_color(i) != bucket_color(i + 1) for i in range(60))
    for color in (*colors, EXPOSED):
        own = luminance(color) + 0.05
        assert (luminance("#ffffff") + 0.05) / own > 3, color
        assert own / (luminance("#16181d") + 0.05) > 3, color


def test_the_trace_has_all_ranks_and_steps(tmp_path: Path) -> None:
    pytest.importorskip("perfetto")
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    report = six_buckets(steps=3, late={1: 0.012})
    report.save(tmp_path / "step.perfetto-trace")
    trace = Trace()
    trace.ParseFromString((tmp_path / "step.perfetto-trace").read_bytes())
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    processes = {uuid: t.process.process_name for uuid, t in tracks.items() if t.HasField("process")}
    assert sorted(processes.values()) == ["rank 0", "rank 1"]
    assert {t.name for t in tracks.values() if t.name} == {"computation", "waits", "transfers", "launched, not moving"}

    durations: dict[tuple[str, str], list[int]] = {}
    began: dict[int, tuple[int, TrackEvent]] = {}
    for packet in trace.packet:
        if packet.HasField("track_event"):
            event = packet.track_event
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                assert event.track_uuid not in began, "slices of one track overlap"
                began[event.track_uuid] = packet.timestamp, event
            else:
                begin, opened = began.pop(event.track_uuid)
                rank = processes[tracks[event.track_uuid].parent_uuid]
                durations.setdefault((rank, opened.name), []).append(packet.timestamp - begin)
                row = tracks[event.track_uuid].name
                if row == "transfers" and opened.name == "reduce bucket 5":
                    notes = {note.name: note for note in opened.debug_annotations}
                    assert notes["bucket"].int_value == 5 and notes["bytes"].int_value == 40 * MIB
                    assert notes["parameters"].string_value.startswith("embedding.weight, positions.weight")
                    assert notes["step"].int_value in (1, 2, 3)
    assert began == {}
    assert durations["rank 0", "wait for late ranks: reduce bucket 5"] == pytest.approx([12_000_000] * 3, abs=2)
    for rank in ("rank 0", "rank 1"):
        assert durations[rank, "wait: reduce bucket 5"] == pytest.approx([42_943_040] * 3, abs=2)
        assert durations[rank, "forward"] == pytest.approx([20_000_000] * 3, abs=2)


def test_every_slice_of_a_large_trace_is_on_a_named_track_whose_times_ascend(tmp_path: Path) -> None:
    pytest.importorskip("perfetto")
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    report = many_buckets()
    report.save(tmp_path / "step.perfetto-trace")
    trace = Trace()
    trace.ParseFromString((tmp_path / "step.perfetto-trace").read_bytes())
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    at_ns: dict[int, int] = {}
    opened: dict[int, list[str]] = {}
    num_slices = 0
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        event, track = packet.track_event, packet.track_event.track_uuid
        assert tracks[track].name and tracks[tracks[track].parent_uuid].process.process_name.startswith("rank ")
        assert packet.timestamp >= at_ns.get(track, 0), "the viewer drops slices that end before they begin"
        at_ns[track] = packet.timestamp
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            assert event.name and not opened.get(track)
            opened.setdefault(track, []).append(event.name)
            num_slices += 1
        else:
            opened[track].pop()
    assert not any(opened.values())
    assert num_slices == sum(len(own) for step in report.steps for own in spans_of(step).values())


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    six_buckets(late={1: 0.012}).plot(tmp_path / "step.png")
    image = Image.open(tmp_path / "step.png").convert("RGB")
    colors = {color for _, color in image.getcolors(maxcolors=1 << 20) or []}
    wanted = (FORWARD, BACKWARD, EXPOSED, LATE, *(bucket_color(i) for i in range(6)))
    for color in wanted:
        assert tuple(bytes.fromhex(color[1:])) in colors, color


def test_json_is_read_back(tmp_path: Path) -> None:
    report = six_buckets(steps=2)
    report.save(tmp_path / "step.json")
    assert StepReport.from_json((tmp_path / "step.json").read_text()) == report


def test_files_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = six_buckets(steps=1)
    with pytest.raises(
        ValueError, match=r"this process: .*'\.pdf'; end it with one of \.html, \.perfetto-trace, \.json"
    ):
        report.save(tmp_path / "step.pdf")
    with pytest.raises(ValueError, match=r"suffix is ''"):
        report.save("step")
    with pytest.raises(ValueError, match=r"end it with \.png, or call save\(\)"):
        report.plot(tmp_path / "step.html")
    with pytest.raises(FileNotFoundError, match=r"no folder '.*missing'; create it first"):
        report.save(tmp_path / "missing" / "step.html")
    for package, suffix in (("perfetto", "perfetto-trace"), ("matplotlib", "png")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=rf"saving a report as \.{suffix} .*pip install {package}, or save it as"):
            report.save(tmp_path / f"step.{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_the_page_of_a_single_step_says_that_it_is_too_few(tmp_path: Path) -> None:
    six_buckets(steps=1).save(tmp_path / "step.html")
    assert "which is too few for advice" in (tmp_path / "step.html").read_text(encoding="utf-8")
