"""Draw the losses of several runs of ``train_lm.py`` in one chart.

    python examples/compare_losses.py runs/*/losses.json --output losses.png

The training losses are means over windows of steps. A table has each run's held-out loss, and its ratio to the first
run's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tabulate import tabulate

WINDOW = 10


def smoothed(losses: list[float]) -> list[float]:
    windows = [losses[max(0, step - WINDOW) : step] for step in range(1, len(losses) + 1)]
    return [sum(window) / len(window) for window in windows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="losses.json of each run")
    parser.add_argument("--output", type=Path, required=True, help="picture to write")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = [json.loads(file.read_text()) for file in arguments.files]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    rows = []
    for run in runs:
        settings, (*_, held_out) = run["settings"], run["held_out"].values()
        name = f"{settings['algorithm']}, seed {settings['seed']}"
        axes.plot(range(1, len(run["losses"]) + 1), smoothed(run["losses"]), linewidth=1, label=name)
        rows.append((name, len(run["losses"]), held_out, held_out / [*runs[0]["held_out"].values()][-1]))
    axes.set(xlabel="step", ylabel=f"training loss (nats per byte), mean of {WINDOW} steps")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(arguments.output, dpi=150)
    print(tabulate(rows, headers=("run", "steps", "held-out loss", "of the first"), floatfmt=".4f"))


if __name__ == "__main__":
    main()
