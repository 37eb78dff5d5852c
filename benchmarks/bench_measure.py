"""What ``model.measure()`` costs: steps with records beside steps without.

    python benchmarks/bench_measure.py [--rounds 60] [--output FILE.csv]

gpt-small on two ranks, one core each, takes both kinds of steps in turns. Printed are the milliseconds of a step on the
slower rank, the processor time of both ranks, and the median ratio with its 95 % interval.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import on_ranks

from ddp_compile import ddp_compile
from ddp_compile.bench.report import report_rows
from ddp_compile.bench.results import median_and_interval
from ddp_compile.bench.settings import WorkloadSettings
from ddp_compile.bench.workloads import make_workload
from ddp_compile.module.mixin import state_of
from ddp_compile.runtime.comm.step_records import NO_RECORDS

WARM_UP = 3


def measure(rounds: int) -> tuple[dict[str, list[list[float]]], int]:
    """For each kind of step the slower rank's seconds and both ranks' processor seconds, and how many transfers."""
    workload = make_workload(WorkloadSettings(model="gpt-small"))
    model: Any = ddp_compile(workload.model)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = workload.make_batch(torch.Generator().manual_seed(dist.get_rank()))
    reducer = state_of(model).reducer
    times: dict[str, list[list[float]]] = {"off": [], "on": []}
    records = None
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            model.measure(steps=None)
            records = reducer._queue.records
        for name in ("off", "on") if number % 2 else ("on", "off"):
            # Measurements begin and end by a meeting of the ranks, which is not what is timed.
            reducer.record_into(NO_RECORDS if name == "off" or records is None else records)
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            workload.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            found = torch.tensor([time.perf_counter() - begin, time.process_time() - cpu], dtype=torch.float64)
            everyone = [torch.empty_like(found) for _ in range(2)]
            dist.all_gather(everyone, found)
            if number >= WARM_UP:
                slower, both = torch.stack(everyone).max(0).values[0], torch.stack(everyone).sum(0)[1]
                times[name].append([float(slower), float(both)])
    return times, len(model.comm_stats().ranks[0].transfers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="steps with records, and as many without")
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    times, num_transfers = on_ranks(2, measure, arguments.rounds)[0]
    rows = []
    for place, what in enumerate(("wall time, slower rank", "processor time, both ranks")):
        off, on = ([each[place] for each in times[name]] for name in ("off", "on"))
        ratio, low, high = median_and_interval(a / b for a, b in zip(on, off, strict=True))
        rows.append(
            {
                "what": what,
                "transfers": num_transfers,
                "off_ms": round(1e3 * statistics.median(off), 2),
                "on_ms": round(1e3 * statistics.median(on), 2),
                "ratio": round(ratio, 4),
                "from": round(low, 4),
                "to": round(high, 4),
            }
        )
    report_rows(rows, arguments.output)


if __name__ == "__main__":
    main()
