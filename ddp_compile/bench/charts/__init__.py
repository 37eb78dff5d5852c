"""Charts of a benchmark run, drawn from its data files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from ddp_compile.bench.charts.appearance import DPI
from ddp_compile.bench.charts.compile_modes import build_compile_modes
from ddp_compile.bench.charts.data_files import BenchmarkRun, read_run
from ddp_compile.bench.charts.gradient_ready import build_gradient_ready
from ddp_compile.bench.charts.message_size import build_message_size
from ddp_compile.bench.charts.step_times import build_bucket_cap_sweep, build_step_time_by_link
from ddp_compile.bench.charts.timeline import build_timeline

__all__ = ["draw_charts"]

#: File name of each chart, and the function that builds it, which returns None if data is missing.
CHARTS: Mapping[str, Callable[[BenchmarkRun], Figure | None]] = {
    "step_time_by_link.png": build_step_time_by_link,
    "bucket_cap_sweep.png": build_bucket_cap_sweep,
    "message_size.png": build_message_size,
    "gradient_ready.png": build_gradient_ready,
    "compile_modes.png": build_compile_modes,
    "timeline.png": build_timeline,
}


def draw_charts(directory: Path) -> list[Path]:
    """Draw every chart for which a benchmark run left data, as PNG files beside that data.

    Args:
        directory: Holds ``summary.csv``, ``messages.csv``, ``ready.csv`` and ``timeline.json``, or some of them. All
            of them are read before the first chart is drawn.

    Returns:
        The charts that were drawn. A chart is left out if its data file is missing or has no usable row; an older file
        of its name is kept.

    Raises:
        ValueError: A data file lacks columns, or contains something other than a number.
    """
    run = read_run(directory)
    drawn = []
    for name, build in CHARTS.items():
        figure = build(run)
        if figure is not None:
            drawn.append(directory / name)
            _save(figure, drawn[-1])
    return drawn


def _save(figure: Figure, path: Path) -> None:
    """Save as a PNG with a palette, which is a third as large as one without."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = canvas.buffer_rgba()
    height, width, _ = pixels.shape
    image = Image.frombuffer("RGBA", (width, height), pixels, "raw", "RGBA", 0, 1).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(path, format="png", optimize=True, dpi=(DPI, DPI))
