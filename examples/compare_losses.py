"""Draw the losses of several runs of ``train_lm.py`` in one chart.

    python examples/compare_losses.py runs/*/losses.json --output losses.png

Packed and padded data have a panel each, and runs are named by the settings in which they differ. The training losses
are means over windows of steps; ``--differences`` shows below, step by step, how far they are from the panel's first
run. A table has each run's held-out loss, its ratio to that of the panel's first run, and the largest difference.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tabulate import tabulate

WINDOW = 10
NAMES = {"ranks": "{} ranks", "average": "mean over {}", "algorithm": "{}", "seed": "seed {}"}
DATA = ("packed", "padded")


def smoothed(losses: list[float]) -> list[float]:
    windows = [losses[max(0, step - WINDOW) : step] for step in range(1, len(losses) + 1)]
    return [sum(window) / len(window) for window in windows]


def named(run: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    if run["settings"]["ranks"] == 1:
        return "one process"
    differing = [name for name in NAMES if len({other["settings"][name] for other in runs}) > 1]
    return ", ".join(NAMES[name].format(run["settings"][name]) for name in differing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="losses.json of each run")
    parser.add_argument("--differences", action="store_true", help="show the differences to the first run, too")
    parser.add_argument("--output", type=Path, required=True, help="picture to write")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = [json.loads(file.read_text()) for file in arguments.files]
    panels = {data: [run for run in runs if run["settings"]["padded"] == (data == "padded")] for data in DATA}
    panels = {data: panel for data, panel in panels.items() if panel}
    figure = Figure(figsize=(8, 5), layout="constrained")
    grid = figure.subplots(1 + arguments.differences, len(panels), squeeze=False, sharex=True, sharey="row")
    rows = []
    for axes, (data, panel) in zip(grid.T, panels.items(), strict=True):
        first = panel[0]
        for number, run in enumerate(panel):
            name, steps = named(run, runs), range(1, len(run["losses"]) + 1)
            width = max(1, 4 - 1.5 * number)  # a wide line shows beneath an equal one
            axes[0].plot(steps, smoothed(run["losses"]), linewidth=width, label=name)
            differences = [abs(own - others) for own, others in zip(run["losses"], first["losses"], strict=False)]
            if arguments.differences:
                axes[1].semilogy(steps[: len(differences)], differences, linewidth=width)
            held_out, of_first = ([*each["held_out"].values()][-1] for each in (run, first))
            rows.append((data, name, len(run["losses"]), held_out, held_out / of_first, max(differences)))
        axes[0].set(title=data)
        axes[0].legend(fontsize=8)
        axes[-1].set(xlabel="step")
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    grid[0, 0].set(ylabel=f"training loss (nats per byte),\nmean of {WINDOW} steps")
    if arguments.differences:
        grid[1, 0].set(ylabel=f"difference to {named(runs[0], runs)}")
    figure.savefig(arguments.output, dpi=100)
    headers = ("data", "run", "steps", "held-out loss", "of the first", "largest difference")
    print(tabulate(rows, headers=headers, floatfmt=("", "", "", ".5f", ".5f", ".1e")))


if __name__ == "__main__":
    main()
