"""Draws README's picture from the committed results: ``python benchmarks/plot_steps.py``."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "steps.png"


class Row(NamedTuple):
    """Two implementations of one run: what the picture says, where they are, and at which capacities in MiB."""

    label: str
    folder: str
    link: str
    ours: str
    ours_cap: str = "25"
    theirs: str = "compile-ddp"
    theirs_cap: str = "25"


SHARDED = "ddp_compile-sharded"
ROWS = (
    Row("GPT 23 M, 1 Gbit/s, defaults of both", "gpt_medium_capacities", "1gbit", "ddp_compile-forward", "5"),
    Row("GPT 23 M, fast link, defaults of both", "gpt_medium_capacities", "none", "ddp_compile-forward", "5"),
    Row("GPT 23 M, 1 Gbit/s", "gpt_medium", "1gbit", "ddp_compile-forward"),
    Row("GPT 23 M, fast link", "gpt_medium", "none", "ddp_compile-forward"),
    Row("CNN 2.8 M, 1 Gbit/s", "models/cnn", "1gbit", "ddp_compile-forward"),
    Row("1000 tiny parameters, 1 Gbit/s", "models/many_tiny", "1gbit", "ddp_compile-auto"),
    Row("the same, clipped (simulated)", "clip_and_tokens/many_tiny", "simulated 1gbit", "ddp_compile-forward"),
    Row("GPT 23 M, clipped (simulated)", "clip_and_tokens/gpt_medium", "simulated 1.4gbit", "ddp_compile-forward"),
    Row("GPT 5 M, tokens (simulated)", "clip_and_tokens/gpt_small_tokens", "simulated 10gbit", "ddp_compile-forward"),
    Row("GPT 23 M, sharded (simulated)", "sharded_simulated", "simulated 650mbit", SHARDED, "5", theirs_cap="5"),
)  # fmt: skip


def step_ms(row: Row, implementation: str, cap: str) -> tuple[float, float, float]:
    """Median and quartiles of a step."""
    with (RESULTS / row.folder / "summary.csv").open() as file:
        found = [
            each
            for each in csv.DictReader(file)
            if (each["link"], each["implementation"], each["bucket_cap_mb"]) == (row.link, implementation, cap)
        ]
    (one,) = found
    return float(one["step_ms"]), float(one["step_ms_p25"]), float(one["step_ms_p75"])


def main() -> None:
    """Write the picture, and print its numbers."""
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for place, row in enumerate(reversed(ROWS)):
        ours, low, high = step_ms(row, row.ours, row.ours_cap)
        theirs, _, _ = step_ms(row, row.theirs, row.theirs_cap)
        color = "#1b7f79" if high < theirs else "#b5651d" if low > theirs else "#777777"
        axes.plot([low / theirs, high / theirs], [place, place], color=color, linewidth=2, solid_capstyle="butt")
        axes.plot(ours / theirs, place, "o", color=color)
        axes.annotate(
            f"{ours / theirs:.2f}", (ours / theirs, place), (0, 5), textcoords="offset points", ha="center", fontsize=8
        )
        print(f"{row.label}: {ours:.1f} ms beside {theirs:.1f}, {ours / theirs:.3f}")
    axes.axvline(1.0, color="#222222", linewidth=1)
    axes.set_yticks(range(len(ROWS)), [row.label for row in reversed(ROWS)], fontsize=9)
    axes.set_ylim(-0.6, len(ROWS) - 0.2)
    axes.set_xlabel("time of a step / that of torch.compile(DDP): medians, and quartiles of ours", fontsize=9)
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
