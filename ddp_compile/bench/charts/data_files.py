"""Reads and checks the files of a benchmark run: tables and one profile."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ddp_compile.errors import with_article


@dataclass(frozen=True, kw_only=True, slots=True)
class SummaryRow:
    """One case on one link; the columns of ``summary.csv`` that a chart needs. None and "" are not measured.

    Times end in their unit; ``bucket_cap_mb`` is in MiB.
    """

    model: str
    parameters: float | None
    world_size: float | None
    link: str
    achieved_gbit: float | None
    implementation: str
    mode: str
    bucket_cap_mb: float | None
    no_sync_every: float | None
    step_ms: float | None
    step_ms_p25: float | None
    step_ms_p75: float | None
    bound_ms: float | None
    cold_compile_s: float | None
    warm_compile_s: float | None
    status: str
    torch: str
    device: str

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        """Lower and upper quartile of a measured step; the median if one is missing."""
        assert self.step_ms is not None
        return (
            self.step_ms if self.step_ms_p25 is None else self.step_ms_p25,
            self.step_ms if self.step_ms_p75 is None else self.step_ms_p75,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageRow:
    """One message size on one link."""

    link: str
    message_bytes: float | None
    all_reduce_ms: float | None
    all_reduce_ms_p25: float | None
    all_reduce_ms_p75: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyRow:
    """When a parameter's gradient was ready, and the MiB of all gradients that were ready by then."""

    implementation: str
    mode: str
    bucket_cap_mb: float | None
    link: str
    ms: float | None
    ready_mib: float | None


class Event(NamedTuple):
    """A stretch of one lane, in milliseconds since the step began."""

    lane: str
    name: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledStep:
    """One step of rank 0 under the profiler."""

    implementation: str
    mode: str
    bucket_cap_mb: float | None
    link: str
    step_ms: float | None
    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkRun:
    """All data of one run; missing tables are empty."""

    summary: tuple[SummaryRow, ...] = ()
    messages: tuple[MessageRow, ...] = ()
    ready: tuple[ReadyRow, ...] = ()
    timeline: tuple[ProfiledStep, ...] = ()


Row = TypeVar("Row", SummaryRow, MessageRow, ReadyRow)


def read_run(directory: Path) -> BenchmarkRun:
    """Read ``summary.csv``, ``messages.csv``, ``ready.csv`` and ``timeline.json``; a missing file has no rows.

    Raises:
        ValueError: A file lacks columns, is not JSON, or contains something other than a number.
    """
    return BenchmarkRun(
        summary=_read_table(directory / "summary.csv", SummaryRow),
        messages=_read_table(directory / "messages.csv", MessageRow),
        ready=_read_table(directory / "ready.csv", ReadyRow),
        timeline=_read_timeline(directory / "timeline.json"),
    )


def _read_table(path: Path, row_type: type[Row]) -> tuple[Row, ...]:
    """The fields of ``row_type`` are the required columns. Other columns are ignored."""
    if not path.exists():
        return ()
    is_text = {field.name: field.type == "str" for field in fields(row_type)}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames is None:
            return ()
        _require(path.name, "columns", is_text, reader.fieldnames)
        rows = []
        for record in reader:
            where = f"{path.name}, line {reader.line_num}"
            cells: dict[str, Any] = {name: record[name] or "" for name in is_text}
            cells |= {name: _number(where, name, cells[name]) for name in is_text if not is_text[name]}
            rows.append(row_type(**cells))
    return tuple(rows)


def _read_timeline(path: Path) -> tuple[ProfiledStep, ...]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        steps = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is not JSON: {error}; run the benchmark again, or delete the file") from error
    if not isinstance(steps, list):
        raise ValueError(
            f"{path.name} holds {with_article(type(steps).__name__)} and not a list; run the benchmark again"
        )
    return tuple(_profiled_step(f"{path.name}, step {i}", step) for i, step in enumerate(steps))


def _profiled_step(where: str, step: Any) -> ProfiledStep:
    _require(where, "keys", [field.name for field in fields(ProfiledStep)], step)
    events = []
    for event in step["events"]:
        _require(f"{where}, events", "keys", Event._fields, event)
        start_ms, end_ms = _number(where, "start_ms", event["start_ms"]), _number(where, "end_ms", event["end_ms"])
        if start_ms is not None and end_ms is not None:
            events.append(Event(event["lane"], event["name"], start_ms, end_ms))
    return ProfiledStep(
        implementation=step["implementation"],
        mode=step["mode"],
        bucket_cap_mb=_number(where, "bucket_cap_mb", step["bucket_cap_mb"]),
        link=step["link"],
        step_ms=_number(where, "step_ms", step["step_ms"]),
        events=tuple(events),
    )


def _require(where: str, what: str, needed: Iterable[str], present: object) -> None:
    if not isinstance(present, Mapping | Sequence):
        raise ValueError(
            f"{where} is {with_article(type(present).__name__)} and not an object; run the benchmark again"
        )
    missing = [name for name in needed if name not in present]
    if missing:
        raise ValueError(f"{where} lacks the {what} {', '.join(missing)}; run the benchmark again, or delete the file")


def _number(where: str, name: str, value: str | float | None) -> float | None:
    """The number; None if there is none or it is not finite, which mean "not measured"."""
    if value is None or value == "":
        return None
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {name}={value!r} must be a number, or nothing where it was not measured") from error
    return number if math.isfinite(number) else None
