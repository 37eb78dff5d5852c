"""Draws README's picture from the committed results: ``python benchmarks/plot_steps.py``."""

import csv
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot as plt

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "steps.png"
COLORS = {"faster": "#1b7f79", "level": "#777777", "slower": "#b5651d"}


class Row(NamedTuple):
    """One line of the picture.

    Args:
        label: What it is called there.
        folder: Of the run, below `RESULTS`.
        link: The run's link.
        ours: The implementation.
        cap: Its capacity in MiB.
        ratio: Ratio and 95 % interval by benchmarks/README.md, if capacities differ or a script of its own measured it.
    """

    label: str
    folder: str
    link: str
    ours: str = "ddp_compile-forward"
    cap: str = "25"
    ratio: tuple[float, float, float] | None = None


SHARDED = "ddp_compile-sharded", "5"
DEFAULTS = "defaults (5 MiB; DDP 25)"
ROWS = (
    Row(f"GPT 23 M, 1 Gbit/s, {DEFAULTS}", "gpt_medium_capacities", "1gbit", ratio=(0.901, 0.877, 0.914)),
    Row(f"GPT 23 M, loopback, {DEFAULTS}", "gpt_medium_capacities", "none", ratio=(1.019, 0.959, 1.053)),
    Row("GPT 23 M, 1 Gbit/s", "gpt_medium", "1gbit"),
    Row("GPT 23 M, loopback", "gpt_medium", "none"),
    Row("CNN 2.8 M, 1 Gbit/s", "models/cnn", "1gbit"),
    Row("MLP 8.4 M, 1 Gbit/s", "models/mlp", "1gbit"),
    Row("MLP 8.4 M, loopback", "models/mlp", "none"),
    Row("1000 tiny parameters, 1 Gbit/s", "models/many_tiny", "1gbit", "ddp_compile-auto"),
    Row("1000 tiny parameters, clipped, 1 Gbit/s*", "clip_and_tokens/many_tiny", "simulated 1gbit"),
    Row("GPT 23 M, clipped, 1.4 Gbit/s*", "clip_and_tokens/gpt_medium", "simulated 1.4gbit"),
    Row("GPT 5 M, mean over tokens, 20 ms latency*", "clip_and_tokens/gpt_small_tokens", "simulated 10gbit"),
    Row("GPT 23 M, AdamW (ours sharded), 650 Mbit/s*", "sharded_simulated", "simulated 650mbit", *SHARDED),
    Row("GPT 23 M, AdamW (ours sharded), 1.3 Gbit/s*", "sharded_simulated", "simulated 1.3gbit", *SHARDED),
    Row("GPT 23 M, Muon (both sharded), 800 Mbit/s*", "", "", ratio=(0.729, 0.694, 0.755)),
)


def ratio_of(row: Row) -> tuple[float, float, float]:
    """Median of the ratios to the best peer, round by round, and its 95 % interval."""
    if row.ratio is not None:
        return row.ratio
    with (RESULTS / row.folder / "summary.csv").open() as file:
        place = row.link, row.ours, row.cap
        (found,) = (r for r in csv.DictReader(file) if (r["link"], r["implementation"], r["bucket_cap_mb"]) == place)
    return float(found["ratio_to_best_peer"]), float(found["ratio_low"]), float(found["ratio_high"])


def main() -> None:
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for place, row in enumerate(reversed(ROWS)):
        ratio, low, high = ratio_of(row)
        color = COLORS["faster" if high < 1 else "slower" if low > 1 else "level"]
        axes.plot([low, high], [place, place], color=color, linewidth=2, solid_capstyle="butt")
        axes.plot(ratio, place, "o", color=color)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}  # the line at 1 does not cross the number
        at: Any = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
        axes.annotate(f"{ratio:.2f}", (ratio, place), fontsize=8, bbox=box, **at)
    axes.axvline(1.0, color="#222222", linewidth=1)
    axes.set_yticks(range(len(ROWS)), [row.label for row in reversed(ROWS)], fontsize=9)
    axes.set_ylim(-0.6, len(ROWS) - 0.2)
    what = "step time relative to the fastest alternative of the run (rows with defaults: torch.compile(DDP))"
    axes.set_xlabel(f"{what}, with 95 % interval", fontsize=9, x=0.2)
    handles = [plt.Line2D([], [], color=color, marker="o", linewidth=2) for color in COLORS.values()]
    axes.legend(handles, list(COLORS), fontsize=8, loc="upper right", frameon=False)
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
