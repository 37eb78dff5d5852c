"""The cost of posting each rank's status (docs/divergence.md), in microseconds of a step.

    python benchmarks/bench_progress.py [--step-ms 25] [--pairs 1000] [--buckets 10] [--output FILE.csv]

Two ranks on gloo with a TCPStore train a small model eagerly. Steps with and without `DesyncMonitor` alternate; small
products after each make it last ``--step-ms``. The times are processor times of the thread that trains, since
wall-clock time would include gloo's threads, which reduce buckets on the same core. Printed are the median and mean
differences of neighboring steps, on the rank with the higher cost, without agreement points; the mean includes all
posts. ``agreeing_us`` is the median wall-clock time of the store requests at an agreement point. ``share_percent`` is
the mean and a 128th of that, as a share of the step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from ranks import on_ranks
from torch import nn

from ddp_compile import ddp_compile
from ddp_compile.bench.report import report_rows
from ddp_compile.runtime.desync.model_order import ITERATIONS_BETWEEN_AGREEMENTS

WIDTH = 64
WARM_UP = 16


class SaysNothing:
    """Replaces a `DesyncMonitor`: every method that a step calls does nothing."""

    def __init__(self, monitor: Any) -> None:
        for name in dir(monitor):
            if not name.startswith("_") and callable(getattr(monitor, name)):
                setattr(self, name, self._nothing)

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass


class Questions:
    """Wall-clock seconds in calls that ask the store."""

    def __init__(self, store: Any) -> None:
        self.seconds = 0.0
        self._ask = store.ask
        store.ask = self._timed

    def _timed(self, *args: Any) -> Any:
        start = time.perf_counter()
        answer = self._ask(*args)
        self.seconds += time.perf_counter() - start
        return answer


def processor_s(model: nn.Module, monitor: Any, step_s: float) -> float:
    """Seconds that the training thread takes on a processor for one step."""
    state = model._ddp_compile_state
    state.monitor = state.reducer._monitor = state.reducer._queue._monitor = monitor
    inputs = torch.ones(4, WIDTH)
    clock, on_processor = time.perf_counter(), time.thread_time()
    model(inputs).sum().backward()
    taken = time.thread_time() - on_processor
    model.zero_grad()
    while time.perf_counter() - clock < step_s:  # compute, since a processor is slow after sleeping
        inputs @ inputs.T
    return taken


def measure(arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """For each pair of steps, the difference, and the seconds in questions to the store."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(arguments.buckets)]
    model = ddp_compile(nn.Sequential(*layers), backend="eager", bucket_cap_mb=1e-4)
    monitor, step_s = model._ddp_compile_state.monitor, arguments.step_ms / 1000
    questions = Questions(monitor._store)
    nothing = SaysNothing(monitor)
    order: list[Any] = [monitor, nothing]
    differences = []
    for _ in range(WARM_UP + arguments.pairs):
        questions.seconds = 0.0
        taken_s = {said: processor_s(model, said, step_s) for said in order}
        differences.append((taken_s[monitor] - taken_s[nothing], questions.seconds))
        order.reverse()  # the first of two costs more, whichever it is
    assert len(model.bucket_plan.buckets) == arguments.buckets
    return differences[WARM_UP:]


def row_of(differences: list[tuple[float, float]], arguments: argparse.Namespace) -> dict[str, object]:
    on_processor_s = [difference for difference, in_questions_s in differences if in_questions_s == 0.0]
    agreeing_s = statistics.median(in_questions_s for _, in_questions_s in differences if in_questions_s > 0.0)
    mean_s = statistics.fmean(on_processor_s)
    return {
        "step_ms": arguments.step_ms,
        "pairs": arguments.pairs,
        "buckets": arguments.buckets,
        "p50_us": round(1e6 * statistics.median(on_processor_s), 1),
        "mean_us": round(1e6 * mean_s, 1),
        "agreeing_us": round(1e6 * agreeing_s, 1),
        "share_percent": round(
            100 * (mean_s + agreeing_s / ITERATIONS_BETWEEN_AGREEMENTS) / (arguments.step_ms / 1000), 3
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--buckets", type=int, default=10)
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    rows = [row_of(differences, arguments) for differences in on_ranks(2, measure, arguments)]
    row = max(rows, key=lambda row: float(str(row["share_percent"])))
    report_rows([row], arguments.output)


if __name__ == "__main__":
    main()
