"""Files of a report, by suffix."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ddp_compile.errors import this_rank
from ddp_compile.report.page import render_page
from ddp_compile.report.steps import StepReport


def save_report(report: StepReport, path: str | os.PathLike[str]) -> None:
    """Write a report to a file, in the format of its suffix; replaces a file that is there.

    Args:
        report: What was measured.
        path: Ends with ``.html``, ``.perfetto-trace``, ``.json`` or ``.png``, in a folder that exists.

    Raises:
        ValueError: The suffix is another one.
        FileNotFoundError: There is no such folder.
        ImportError: The format needs a package that is not installed.
    """
    path = Path(path)
    write = _WRITERS.get(path.suffix)
    if write is None:
        raise ValueError(
            f"{this_rank()}: cannot save a report to {str(path)!r}: its suffix is {path.suffix!r}; end it with one of "
            f"{', '.join(_WRITERS)}"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{this_rank()}: cannot save a report to {str(path)!r}: there is no folder {str(path.parent)!r}; create it "
            "first"
        )
    write(report, path)


def plot_report(report: StepReport, path: str | os.PathLike[str]) -> None:
    """Draw a report as ``.png``; as `save_report`, which also takes the other suffixes.

    Args:
        report: What was measured.
        path: Ends with ``.png``, in a folder that exists.

    Raises:
        ValueError: The suffix is another one.
    """
    if Path(path).suffix != ".png":
        raise ValueError(
            f"{this_rank()}: cannot plot a report to {str(path)!r}: its suffix is {Path(path).suffix!r}; end it with "
            ".png, or call save() for other formats"
        )
    save_report(report, path)


def _write_page(report: StepReport, path: Path) -> None:
    path.write_text(render_page(report), encoding="utf-8")


def _write_json(report: StepReport, path: Path) -> None:
    path.write_text(report.to_json(), encoding="utf-8")


def _write_trace(report: StepReport, path: Path) -> None:
    _require("perfetto", path)
    from ddp_compile.report.trace import write_trace

    write_trace(report, path)


def _write_chart(report: StepReport, path: Path) -> None:
    _require("matplotlib", path)
    from ddp_compile.report.chart import draw_chart

    draw_chart(report, path)


def _require(package: str, path: Path) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"{this_rank()}: saving a report as {path.suffix} needs the package {package}, which cannot be imported "
            f"({error}); pip install {package}, or save it as .html or .json"
        ) from error


_WRITERS: Mapping[str, Callable[[StepReport, Path], None]] = {
    ".html": _write_page,
    ".perfetto-trace": _write_trace,
    ".json": _write_json,
    ".png": _write_chart,
}
