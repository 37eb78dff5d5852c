"""Files of reports: the page is small, offline and escaped; the trace has what was measured."""

import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from simulated_steps import MIB, Simulation, many_buckets, six_buckets

from ddp_compile.report.page import render_page

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


def test_a_large_page_is_small() -> None:
    text = render_page(many_buckets())  # 60 buckets, 8 ranks, 20 steps
    assert len(text.encode()) < 300_000
    page = Page(text)
    assert page.tags["tr"] == 1 + 2 * 60
    assert page.tags["rect"] > 8 * 2 * 60


def test_page_loads_nothing() -> None:
    text = render_page(six_buckets(late={1: 0.01}))
    assert re.findall(r"https?://[^\"']*", text) == ["http://www.w3.org/2000/svg"]
    assert re.findall(r"(?i)<(?:script|link|img|iframe|object)|@import|url\(|\ssrc=|\shref=", text) == []
    assert "prefers-color-scheme:dark" in text


def test_page_text() -> None:
    report = six_buckets(ranks=4, late={3: 0.012})
    words = Page(render_page(report)).words
    said = " ".join(words)
    for advice in report.advice():
        assert f"{advice.text[0].upper()}{advice.text[1:]}." in said
    headline = "step 175 ms, compute 120 ms, communication 69 ms, exposed 43 ms (most in bucket 5)"
    assert f"Medians of 20 steps: {headline}" in words
    assert "late by 12 ms" in words and words.count("rank 3") == 1
    row = words[words.index("embedding.weight, positions.weight, blocks.0.norm.weight, blocks.0.norm.bias") :][:6]
    assert row[1:] == ["40", "132.0", "132.0", "42.9", "42.9"]


def test_names_are_escaped() -> None:
    evil = "<script>alert('&\"')</script>"
    report = Simulation(
        model=evil, buckets=[([evil], MIB), ([f"{evil}{'x' * 1000}"], 9 * MIB)], ready=[0.1, 0.11]
    ).run()
    text = render_page(report)
    page = Page(text)
    assert "<script" not in text and "&lt;script&gt;" in text
    assert page.tags["script"] == 0 and max(map(len, page.words[-60:])) < 400
    assert evil in " ".join(page.words)


def test_trace(tmp_path: Path) -> None:
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


def test_files_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = six_buckets(steps=1)
    for suffix in (".pdf", ".png", ""):
        with pytest.raises(ValueError, match=rf"this process: .* '{suffix}'; end it with one of \.html, \.perf"):
            report.save(tmp_path / f"step{suffix}")
    with pytest.raises(ValueError, match=r"plot\('step.png'\) is no longer there, .* call save\(\"step.html\"\)"):
        report.plot("step.png")
    with pytest.raises(FileNotFoundError, match=r"no folder '.*missing'; create it first"):
        report.save(tmp_path / "missing" / "step.html")
    monkeypatch.setitem(sys.modules, "ddp_compile.report.trace", None)  # as without perfetto
    with pytest.raises(ImportError, match=r"pip install perfetto, or save it as \.html"):
        report.save(tmp_path / "step.perfetto-trace")
    assert list(tmp_path.iterdir()) == []
