"""The steps of all ranks as one trace for ui.perfetto.dev.

Steps follow one another without what lies between them, such as the optimizer, of which a report has no times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from ddp_compile.errors import shorten_names
from ddp_compile.plan.spec import BucketSpec
from ddp_compile.report.spans import Lane, Span, spans_of
from ddp_compile.report.steps import MeasuredSteps

#: Rows of a rank.
_ROWS: Mapping[Lane, str] = {
    "computation": "computation",
    "launch": "launches",
    "late": "waits",
    "wait": "waits",
    "queue": "launched, not moving",
    "transfer": "transfers",
}
_SEQUENCE = 1


def write(report: MeasuredSteps, path: Path) -> None:
    """Write all steps of all ranks: a process for each rank, with rows for computation, waits and transfers."""
    writer = _Writer(report.buckets)
    begin = 0.0
    for step in report.steps:
        spans = spans_of(step)
        times = [time for own in spans.values() for span in own for time in (span.begin, span.end)]
        begin -= min(times)
        for rank, own in spans.items():
            writer.write(rank, own, begin, step.number)
        begin += max(times)
    path.write_bytes(writer.trace.serialize())


class _Writer:
    """Writes events and the tracks that they need."""

    def __init__(self, buckets: Iterable[BucketSpec]) -> None:
        self.trace = TraceProtoBuilder()
        self._buckets = {bucket.index: bucket for bucket in buckets}
        self._tracks: dict[tuple[int, str, int], int] = {}
        self._busy_until: dict[int, int] = {}

    def write(self, rank: int, spans: Iterable[Span], begin: float, step: int) -> None:
        for span in sorted(spans, key=lambda span: span.begin):
            first, last = round(1e9 * (begin + span.begin)), round(1e9 * (begin + span.end))
            track = self._free_track(rank, _ROWS[span.lane], first)
            self._busy_until[track] = last
            event = self._event(track, first, TrackEvent.TYPE_SLICE_BEGIN)
            event.name = span.name
            self._annotate(event, "step", step)
            if span.lane == "transfer" and span.transfer is not None:
                bucket = self._buckets[span.transfer.bucket]
                self._annotate(event, "bucket", bucket.index)
                self._annotate(event, "bytes", span.transfer.num_bytes)
                self._annotate(event, "parameters", shorten_names([gradient.fqn for gradient in bucket.gradients]))
            self._event(track, last, TrackEvent.TYPE_SLICE_END)

    def _free_track(self, rank: int, row: str, at_ns: int) -> int:
        """A track with no open slice; the viewer merges tracks that have the same name."""
        number = 0
        while self._busy_until.get(track := self._track(rank, row, number), at_ns) > at_ns:
            number += 1
        return track

    def _track(self, rank: int, row: str, number: int) -> int:
        key = (rank, row, number)
        if key not in self._tracks:
            if (rank, "", 0) not in self._tracks and row:
                self._track(rank, "", 0)
            self._tracks[key] = len(self._tracks) + 1
            descriptor = self.trace.add_packet().track_descriptor
            descriptor.uuid = self._tracks[key]
            if row:
                descriptor.parent_uuid, descriptor.name = self._tracks[rank, "", 0], row
            else:
                # The viewer takes process 0 for the idle process.
                descriptor.process.pid, descriptor.process.process_name = rank + 1, f"rank {rank}"
        return self._tracks[key]

    def _event(self, track: int, at_ns: int, kind: TrackEvent.Type) -> TrackEvent:
        packet = self.trace.add_packet()
        packet.timestamp, packet.trusted_packet_sequence_id = at_ns, _SEQUENCE
        packet.track_event.type, packet.track_event.track_uuid = kind, track
        return packet.track_event

    def _annotate(self, event: TrackEvent, name: str, value: int | str) -> None:
        annotation = event.debug_annotations.add()
        annotation.name = name
        setattr(annotation, "int_value" if isinstance(value, int) else "string_value", value)
