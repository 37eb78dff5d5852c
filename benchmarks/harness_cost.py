"""The cost of the harness itself: its step compared with a bare loop, in turns, in one process on one core.

``python benchmarks/harness_cost.py`` prints the median of the ratios and its 95 % interval.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist

from ddp_compile.bench.implementations import IMPLEMENTATIONS, LOCAL
from ddp_compile.bench.results import median_ratio
from ddp_compile.bench.settings import Case, StepRecord, WorkloadSettings
from ddp_compile.bench.training import Training, timed_steps
from ddp_compile.bench.workloads import make_workload

ROUNDS = 30
STEPS = 5


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        settings = WorkloadSettings(model="gpt-small")
        workload = make_workload(settings)
        implementation = IMPLEMENTATIONS[LOCAL](workload.model, Case(implementation=LOCAL))
        training = Training(implementation, workload.model, workload, settings, rank=0, micro_batches=1)

        def bare() -> list[StepRecord]:
            times = []
            for i in range(STEPS + 1):
                start = time.perf_counter()
                inputs, targets = training.batches[i]
                workload.loss(implementation.forward(inputs), targets).backward()
                (optimizer,) = training.optimizers
                optimizer.step()
                optimizer.zero_grad()
                times.append(StepRecord(time.perf_counter() - start, 0.0, 0.0, 0.0, 0.0))
            return times[1:]

        bare()
        rounds = [(timed_steps(training, 1, STEPS), bare()) for _ in range(ROUNDS)]
        dist.destroy_process_group()
    ratio, low, high = median_ratio([ours for ours, _ in rounds], [theirs for _, theirs in rounds])
    alone = statistics.median(step.step_s for _, steps in rounds for step in steps)
    print(
        f"bare loop {1000 * alone:.1f} ms a step; the harness takes {ratio:.4f} of it (95 %: {low:.4f} to {high:.4f})"
    )


if __name__ == "__main__":
    main()
