"""Benchmarks on one CUDA device without a network: ``make gpu-bench``.

Parts are runs of ``python -m ddp_compile bench``: NCCL with one rank, which shows each implementation's cost in
addition to the computation, and a simulated link, which shows how much it overlaps. There are two on a link, so that
each has only four models to compile; compare figures of the same part alone.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from gpu_parts import Part, Starts, main, read_rows, without_packages

MODEL = ["--model", "gpt-medium", "--depth", "8", "--width", "1024", "--batch-size", "32"]
REHEARSED = ["--model", "mlp", "--depth", "2", "--width", "64", "--batch-size", "4", "--rounds", "1", "--steps", "1"]
RATES = ("25gbit", "100gbit", "400gbit")
#: For each part, whether on a simulated link, and the implementations.
PARTS = {
    "one_rank": (False, "ddp-eager,compile-ddp,ddp_compile-forward"),
    "simulated_link": (True, "ddp-eager,compile-ddp,ddp_compile-forward,ddp_compile-backward"),
    "simulated_link_whole": (True, "ddp-eager,functional,ddp_compile-forward,ddp_compile-none"),
}
ROUNDS, STEPS = 12, 2
#: Assumed seconds of a step without communication: 2.5e12 operations in float32 on an H100. And its gradients.
STEP_S, GRADIENT_BYTES = 0.1, 4.4e8
SIMULATED_RANKS = 8
NOT_COMPILED = ("communication", "ddp-eager")


def starts(is_simulated: bool, implementations: str) -> Starts:
    names = ["local", "communication", *implementations.split(",")]
    gbits = [float(rate.removesuffix("gbit")) for rate in RATES] if is_simulated else [float("inf")]
    # As if nothing were hidden.
    of_links = [STEP_S + 2 * 8 * GRADIENT_BYTES * (1 - 1 / SIMULATED_RANKS) / (1e9 * gbit) for gbit in gbits]
    num_steps = len(names) * ROUNDS * (1 + STEPS)  # the first of a turn is not timed
    compilations = sum(name not in NOT_COMPILED for name in names)
    return Starts(processes=len(names), compilations=compilations, other_s=num_steps * sum(of_links))


def parts(device: str, folder: Path) -> list[Part]:
    """All parts in order, for "cuda" or, as a rehearsal with a small model, "cpu"."""
    made = []
    for name, (is_simulated, implementations) in PARTS.items():
        rates = ",".join(rate if device == "cuda" else f"simulated:{rate}" for rate in RATES)
        link = ["--link", rates, "--simulated-ranks", str(SIMULATED_RANKS)] if is_simulated else ["--link", "none"]
        sizes = [*MODEL, "--rounds", str(ROUNDS), "--steps", str(STEPS)] if device == "cuda" else REHEARSED
        flags = ["--device", device, *sizes, *link, "--implementations", implementations, "--only-steps"]
        command = [sys.executable, "-m", "ddp_compile", "bench", *flags, "--output", str(folder / name)]
        made.append(
            Part(
                name=name,
                command=command,
                limit_s=450 if is_simulated else 300,
                starts=partial(starts, is_simulated, implementations),
                figures=partial(read_rows, folder / name / "summary.csv"),
                missing=without_packages("tabulate", "tqdm"),
            )
        )
    return made


if __name__ == "__main__":
    sys.exit(main("gpu-bench", __doc__ or "", parts, sys.argv[1:]))
