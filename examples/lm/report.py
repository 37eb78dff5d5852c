"""The output of a run: a progress bar, a chart of the loss, and its numbers."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from lm.checkpoint import Progress
from lm.world import World


class TrainingLog:
    """Collects the losses of the steps into a `Progress`, and shows loss and speed in a progress bar on rank 0.

    Reading a loss waits for the device, so losses stay there until ``flush``.

    Args:
        progress: Receives the losses.
        steps: Steps of the whole run.
        tokens_per_step: Tokens that all ranks together compute in a step, padding included.
        world: The ranks over which losses are averaged.
    """

    def __init__(self, progress: Progress, steps: int, tokens_per_step: int, world: World) -> None:
        self.progress = progress
        self.tokens_per_step = tokens_per_step
        self.world = world
        self.bar = tqdm(
            desc="compiling",
            total=steps,
            initial=progress.step,
            disable=not world.is_main,
            bar_format="{desc} {n}/{total} |{bar:20}| {elapsed}{postfix}",
        )
        self.pending: list[Tensor] = []
        self.seconds_per_step: list[float] = []
        self.clock = time.perf_counter()

    def __enter__(self) -> TrainingLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.close()

    def add(self, totals: Tensor) -> None:
        """Count a step with this rank's summed loss and its number of bytes, ``(2,)``."""
        self.pending.append(totals)
        self.progress.step += 1
        self.bar.update()

    def flush(self) -> None:
        """Average the losses since the last flush over the bytes of all ranks. Every rank has to call it."""
        losses, counts = self.world.mean(torch.stack(self.pending)).unbind(1)
        self.progress.losses += (losses / counts).tolist()
        self.seconds_per_step.append((time.perf_counter() - self.clock) / len(self.pending))
        self.pending.clear()
        self.clock = time.perf_counter()
        self.bar.set_description("training", refresh=False)
        self.bar.set_postfix_str(f"loss {self.progress.losses[-1]:.4f}, {self.speed(last=1)}")

    def write(self, text: str) -> None:
        """Print above the bar, on rank 0."""
        if self.world.is_main:
            self.bar.write(text, file=sys.stdout)

    def speed(self, last: int = 0) -> str:
        """The median speed over the ``last`` flushes (0: all). The first flush, which compiles, does not count."""
        measured = self.seconds_per_step[1:][-last:]
        if not measured:
            return "speed not measured yet"
        seconds = statistics.median(measured)
        return f"{1000 * seconds:.0f} ms a step, {self.tokens_per_step / seconds:.0f} tokens/s"


def write_report(out_dir: Path, progress: Progress, settings: dict[str, Any]) -> list[Path]:
    """Write ``losses.json`` and ``loss.png``.

    The JSON holds ``settings``, ``losses`` (nats per byte, one for each step) and ``held_out`` (nats per byte by step),
    with every digit.

    Returns:
        The files written.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    numbers = out_dir / "losses.json"
    contents = {"settings": settings, "losses": progress.losses, "held_out": progress.held_out}
    numbers.write_text(json.dumps(contents, indent=1, default=str) + "\n")
    picture = out_dir / "loss.png"
    _loss_curve(progress).savefig(picture, dpi=150)
    return [numbers, picture]


def _loss_curve(progress: Progress) -> Figure:
    # A Figure without pyplot needs no display.
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(progress.losses) + 1), progress.losses, linewidth=1, label="training")
    axes.plot(list(progress.held_out), list(progress.held_out.values()), "o", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Byte-level GPT on Python's standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
