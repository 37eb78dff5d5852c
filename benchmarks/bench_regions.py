"""Costs and gains of regional compilation: the first step with empty caches, and later steps.

    python benchmarks/bench_regions.py [--model gpt-small] [--depth 24] [--backend inductor] [--rounds 10]
        [--output FILE.csv]

Like bench_simulated_link.py: one rank on a simulated link, whole steps with AdamW, each way to compile in its own
process and in turns. Each process has its own empty cache directory, and compiles while the others sleep. In addition
to the milliseconds of a step:

- start_s: time to compile the sum of one tensor, before there is a model: imports, a precompiled header, a test for
  vector instructions. A process, or a cache directory, pays this once;
- cold_s: how much longer the first step, which compiles, takes than the third. Inductor compiles in this process and in
  C++ compilers that it waits for, so cold_cpu_s, the same in processor seconds, is also right on a busy machine;
- cpu_ms: median of the processor time of a step;
- early: number of buckets launched before the gradient of the first registered parameter, and number of all buckets.

"outside too" also compiles the embeddings, the norm and the head separately, which otherwise run eagerly.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_simulated_link import NUM_WARM, add_arguments, compare, measure, report
from torch import Tensor, nn

from ddp_compile import ddp_compile
from ddp_compile.bench.implementations import Implementation
from ddp_compile.bench.settings import WorkloadSettings
from ddp_compile.bench.training import Training
from ddp_compile.bench.workloads import GPT, Block, make_workload

WHOLE = "whole model"
VARIANTS: dict[str, dict[str, Any]] = {
    WHOLE: {},
    "regions": {"regions": "auto"},
    "regions, outside too": {"regions": [Block, nn.Embedding, nn.LayerNorm, nn.Linear]},
}


class Launches:
    """Counts the buckets that are launched in one step, and how many of them the backward hides.

    Args:
        model: A replicated module.
    """

    def __init__(self, model: Any) -> None:
        self.num_all = self.num_early = 0
        self._last_has_come = False
        next(model.parameters()).register_post_accumulate_grad_hook(self._last_comes)
        algorithm = model.comm_algorithm
        self._launch = algorithm.launch
        algorithm.launch = self._count

    def begin(self) -> None:
        self.num_all = self.num_early = 0
        self._last_has_come = False

    def _last_comes(self, _parameter: Tensor) -> None:
        self._last_has_come = True

    def _count(self, *args: Any) -> Any:
        self.num_all += 1
        self.num_early += not self._last_has_come
        return self._launch(*args)


def processor_s() -> float:
    """Processor time of this process and of the processes that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


class Measured(NamedTuple):
    """Trains, and writes its figures to a file.

    Args:
        training: What trains.
        launches: Its buckets.
        path: The file.
        start_s: Seconds of the compilation before there was a model.
        wall_s: Seconds of each step.
        cpu_s: Processor seconds of each step.
    """

    training: Training
    launches: Launches
    path: Path
    start_s: float
    wall_s: list[float]
    cpu_s: list[float]

    def step(self) -> None:
        self.launches.begin()
        wall, cpu = time.perf_counter(), processor_s()
        self.training.step()
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(processor_s() - cpu)
        if len(self.wall_s) < NUM_WARM:
            return
        found = {
            "cpu_ms": round(1000 * statistics.median(self.cpu_s[NUM_WARM // 2 :]), 1),
            "start_s": round(self.start_s, 1),
            "cold_s": round(self.wall_s[0] - self.wall_s[2], 1),
            "cold_cpu_s": round(self.cpu_s[0] - self.cpu_s[2], 1),
            "early": f"{self.launches.num_early} of {self.launches.num_all}",
        }
        self.path.write_text(json.dumps(found))


def start_compiler(backend: str) -> float:
    """Compile next to nothing, forward and backward; returns the seconds."""
    start = time.perf_counter()
    torch.compile(lambda values: values.sin().sum(), backend=backend)(torch.ones(64, requires_grad=True)).backward()
    torch._dynamo.reset()
    return time.perf_counter() - start


def make_training(name: str, arguments: argparse.Namespace) -> Measured:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=arguments.directory)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    start_s = start_compiler(arguments.backend)
    settings = WorkloadSettings(
        model=arguments.model, depth=arguments.depth, width=arguments.width, optimizer="adamw", device="cpu"
    )
    torch.manual_seed(0)
    workload = make_workload(settings)
    assert isinstance(workload.model, GPT), "the variants name its blocks"
    model: Any = ddp_compile(
        workload.model, bucket_cap_mb=arguments.bucket_cap_mb, backend=arguments.backend, **VARIANTS[name]
    )
    training = Training(Implementation(forward=model), workload.model, workload, settings, 0, 1)
    return Measured(training, Launches(model), arguments.directory / f"{name}.json", start_s, [], [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(model="gpt-small", rounds=10)
    parser.add_argument("--depth", type=int, default=24, help="equal blocks")
    parser.add_argument("--width", type=int, help="features of a block (default: the model's)")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--variants", default=";".join(VARIANTS), help="separated by semicolons")
    arguments = parser.parse_args()
    names = arguments.variants.split(";")
    with tempfile.TemporaryDirectory(prefix="bench_regions_") as directory:
        arguments.directory = Path(directory)
        rows = compare(measure(make_training, names, arguments), names[0])
        for row in rows:
            row |= json.loads((arguments.directory / f"{row['name']}.json").read_text())
    report(rows, names[0], arguments)


if __name__ == "__main__":
    main()
