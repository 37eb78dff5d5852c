"""Processor time of the planner, and how much shorter its steps are than those of the best capacity, by prediction.

    python benchmarks/bench_planner.py [--gradients 5000] [--output FILE.csv]

Settings are gradients of equal, random and GPT-like sizes, and one that is nine times all others together; transfers of
a quarter of the computation, as long, and twice as long; latencies of 20 and 300 us; and launches of 0, 10 and 100 us.
No rank and no link is needed. "to_finer_max" compares with the plan of a finer search: with up to 200 gradients the
optimum, with more one that begins with 48 places instead of 16 and moves boundaries by single gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from ddp_compile.bench.report import report_rows
from ddp_compile.plan import optimum
from ddp_compile.plan.costs import Collective, Costs
from ddp_compile.plan.planner import Atom, Capacities, LeastTime, atoms_of
from ddp_compile.plan.schedule import Load, predict
from ddp_compile.plan.spec import GradientSpec

FORWARD_S, BACKWARD_S = 0.067, 0.133
#: Of a block of a GPT, relative to each other.
GPT = (4e6, 4e6, 1e6, 4e3, 4e3, 3e6, 12e3, 1e3)
CAPS_MIB = (1, 2, 5, 10, 25, 50, 100)


def sizes_of(kind: str, number: int) -> list[int]:
    """Numbers of elements."""
    rng = random.Random(number)
    if kind == "equal":
        return [10_000] * number
    if kind == "random":
        return [int(10 ** rng.uniform(2, 6)) for _ in range(number)]
    if kind == "one large":
        return [9 * 10_000 * number if i == number // 2 else 10_000 for i in range(number)]
    return [int(GPT[i % len(GPT)] / 4 * rng.uniform(0.9, 1.1)) for i in range(number)]


def settings(number: int) -> Iterator[tuple[list[GradientSpec], Costs]]:
    for kind, ratio, latency_s, launch_s in itertools.product(
        ("equal", "random", "gpt", "one large"), (0.25, 1, 2), (2e-5, 3e-4), (0.0, 1e-5, 1e-4)
    ):
        gradients = [GradientSpec(i, f"p{i}", size, "float32", "cpu") for i, size in enumerate(sizes_of(kind, number))]
        total = sum(gradient.num_bytes for gradient in gradients)
        # Half of the backward goes by bytes, the other half by gradients.
        shares = [0.5 * gradient.num_bytes / total + 0.5 / number for gradient in gradients]
        ready_s = [BACKWARD_S * share for share in itertools.accumulate(shares)]
        yield (
            gradients,
            Costs(
                reduce=Collective(latency_s=latency_s, s_per_byte=ratio * (FORWARD_S + BACKWARD_S) / total),
                ready_s=ready_s,
                launch_s=launch_s,
                step_s_per_byte=0.02 / total,
                forward_s=FORWARD_S,
                needed_s=[FORWARD_S * max(0.0, 1 - each / BACKWARD_S) for each in ready_s],
            ),
        )


def sharded(costs: Costs) -> Costs:
    half = replace(costs.reduce, s_per_byte=costs.reduce.s_per_byte / 2)
    return replace(costs, reduce=half, gather=half)


def of_two_dtypes(gradients: list[GradientSpec]) -> list[GradientSpec]:
    return [replace(gradient, dtype="bfloat16") if gradient.index % 2 else gradient for gradient in gradients]


@contextlib.contextmanager
def finer_search(number: int) -> Iterator[None]:
    settings = {"EXACT_PIECES": number} if number <= 200 else {"COARSE_PIECES": 48, "_CLOSER": 2, "_FINEST": number}
    with patch.multiple(optimum, **settings):
        yield


def row_of(
    name: str, cases: list[tuple[list[GradientSpec], Costs]], largest_bytes: int | None = None
) -> dict[str, object]:
    times, gains, numbers, to_finer = [], [], [], []
    for gradients, costs in cases:
        atoms, planner = atoms_of(gradients), LeastTime(costs, largest_bytes)
        began = time.process_time()
        groups = planner.group(atoms)
        times.append(time.process_time() - began)
        numbers.append(len(groups))
        with finer_search(len(gradients)):
            finer = planner.group(atoms)
        of_caps = [Capacities([cap * 2**20], largest_bytes).group(atoms) for cap in CAPS_MIB]
        step_s, finer_s, *caps_s = (
            predict([load_of(group.atoms, costs) for group in each], costs).step_s for each in [groups, finer, *of_caps]
        )
        gains.append(step_s / min(caps_s))
        to_finer.append(step_s / finer_s)
    return {
        "planned": name,
        "settings": len(cases),
        "ms": round(median(times) * 1e3, 1),
        "ms_min": round(min(times) * 1e3, 1),
        "ms_max": round(max(times) * 1e3, 1),
        "buckets": f"{min(numbers)} to {max(numbers)}",
        "to_best_cap": round(median(gains), 4),
        "to_best_cap_max": round(max(gains), 4),
        "to_finer_max": round(max(to_finer), 4),
    }


def load_of(atoms: Sequence[Atom], costs: Costs) -> Load:
    indices = [atom.gradient.index for atom in atoms]
    return Load(
        sum(atom.gradient.num_bytes for atom in atoms),
        max(costs.ready_s[i] for i in indices),
        min(costs.needed_s[i] for i in indices),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradients", type=int, default=5000)
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = list(settings(arguments.gradients))
    gc.freeze()  # so that no collection looks at all of them while something is timed
    shards = [(gradients, sharded(costs)) for gradients, costs in cases]
    rows = [
        row_of("all-reduce, launches that cost nothing", [(g, c) for g, c in cases if not c.launch_s]),
        row_of("all-reduce, launches that delay the computation", [(g, c) for g, c in cases if c.launch_s]),
        row_of("sharded optimizer", shards),
        row_of("sharded optimizer, two dtypes in turn", [(of_two_dtypes(gradients), c) for gradients, c in shards]),
        row_of("sharded optimizer, buckets of at most 5 MiB", shards, 5 * 2**20),
    ]
    report_rows(rows, arguments.output, gradients=arguments.gradients)


if __name__ == "__main__":
    main()
