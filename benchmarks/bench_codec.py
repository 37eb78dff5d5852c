"""The min-max codec compared with a copy of the values, on one thread.

    python benchmarks/bench_codec.py [--mib 1 25] [--rounds 40] [--output FILE.csv]

``compress`` reads the values twice, for their range and for their codes, ``decompress`` writes them once. Ratios are
medians over rounds. In each round every way has a turn, in changing order. ``--device cuda`` uses a CUDA device.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate

from ddp_compile.bench.provenance import commit, processor
from ddp_compile.bench.report import write_csv
from ddp_compile.kernels import minmax_u8_compress, minmax_u8_decompress

TURN_S = 0.01  # minimum length of a turn


def ways_of(numel: int, num_chunks: int, device: str) -> dict[str, Callable[[], object]]:
    values, out = torch.randn(numel, device=device), torch.empty(numel, device=device)
    rows = minmax_u8_compress(values, num_chunks)
    return {
        "copy": lambda: out.copy_(values),
        "compress": lambda: minmax_u8_compress(values, num_chunks),
        "decompress": lambda: minmax_u8_decompress(rows, out),
    }


def seconds_of(way: Callable[[], object], calls: int, device: str) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        way()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def measure(mib: float, rounds: int, device: str) -> list[dict[str, object]]:
    rows = []
    numel = int(mib * (1 << 20)) // 4
    for num_chunks in (2, -(-numel // (1 << 16))):  # the chunks of ByteGrad with two ranks, and of the ring
        ways = ways_of(numel, num_chunks, device)
        calls = {name: max(1, round(TURN_S / seconds_of(way, 3, device))) for name, way in ways.items()}
        times: dict[str, list[float]] = {name: [] for name in ways}
        shuffled = random.Random(0)
        for _ in range(rounds):
            for name in shuffled.sample(list(ways), len(ways)):
                times[name].append(seconds_of(ways[name], calls[name], device))
        for name, values in times.items():
            ratios = sorted(a / b for a, b in zip(values, times["copy"], strict=True))
            rows.append(
                {
                    "mib": mib,
                    "chunks": num_chunks,
                    "way": name,
                    "p50_us": round(1e6 * statistics.median(values), 1),
                    "x_copy": round(statistics.median(ratios), 3),
                    "p20": round(ratios[len(ratios) // 5], 3),
                    "p80": round(ratios[-1 - len(ratios) // 5], 3),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 25], help="sizes of the values in float32")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each way")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for mib in arguments.mib for row in measure(mib, arguments.rounds, arguments.device)]
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else processor()
    print(f"{where}, torch {torch.__version__}, {commit()}")
    print(tabulate(rows, headers="keys"))
    if arguments.output is not None:
        same = {"device": where, "torch": torch.__version__, "python": platform.python_version(), "commit": commit()}
        write_csv(arguments.output, [*rows[0], *same], [{**row, **same} for row in rows])


if __name__ == "__main__":
    main()
