"""Steps with ``bucket_cap_mb="auto"`` beside fixed capacities and optimal boundaries, measured and predicted.

    python benchmarks/bench_planning.py [--models gpt-medium,gpt-small,cnn,many-tiny] [--rates 1gbit,2gbit,4gbit,40gbit]
        [--caps 1,5,25,100] [--rounds 15] [--sharded] [--output FILE.csv]

One rank on a simulated link, whose transfers slow down no computation. Each round times a forward and a backward of
every plan once, so that a slow moment falls on all of them; with ``--sharded`` also the step of a sharded AdamW.
``bucket_cap_mb="auto"`` first trains until its plan stays. When gradients are ready, for the predictions, is measured
in backwards that send nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.bench.report import report_rows
from ddp_compile.bench.results import median_and_interval
from ddp_compile.bench.settings import WorkloadSettings
from ddp_compile.bench.simulated_link import LinkModel, init_simulated_process_group, set_link_model
from ddp_compile.bench.workloads import Workload, make_workload
from ddp_compile.features.automatic_plan import FIRST_MEASURED, NUM_MEASURED
from ddp_compile.plan.costs import Collective, Computation
from ddp_compile.plan.planner import LeastTime
from ddp_compile.plan.scenarios import Model
from ddp_compile.plan.schedule import loads_of, predict
from ddp_compile.validation.rates import Rate

#: After so many steps ``bucket_cap_mb="auto"`` has measured, planned, measured its plan, and perhaps gone back.
STEPS_OF_AUTO = FIRST_MEASURED + 2 * NUM_MEASURED + 28
#: Steps in which a plan is agreed on, packed again and compiled.
STEPS_OF_PLANS = 5
#: Of a launch, by the hooks and threads of one process.
LAUNCH_S = 1e-4


class Trained(NamedTuple):
    """A replicated model with its data."""

    replicated: Any
    workload: Workload
    batch: tuple[torch.Tensor, torch.Tensor]
    optimizer: torch.optim.Optimizer | None

    def step(self, steps: bool = True) -> tuple[float, float, float, float]:
        """When a step began, its backward began, the optimizer began, and it ended.

        Args:
            steps: Whether the optimizer steps, if there is one.
        """
        self.replicated.zero_grad()
        inputs, targets = self.batch
        began = time.perf_counter()
        loss = self.workload.loss(self.replicated(inputs), targets)
        backward = time.perf_counter()
        loss.backward()
        reduced = time.perf_counter()
        if steps and self.optimizer is not None:
            self.optimizer.step()
        return began, backward, reduced, time.perf_counter()

    def steps(self, number: int) -> Trained:
        for _ in range(number):
            self.step()
        return self


def train(arguments: argparse.Namespace, name: str, **settings: Any) -> Trained:
    workload = make_workload(WorkloadSettings(model=name, optimizer="sgd", device="cpu"))
    batch = workload.make_batch(torch.Generator().manual_seed(1))
    replicated: Any = ddp_compile(workload.model, backend=arguments.backend, **settings)
    optimizer = None
    if arguments.sharded:
        optimizer = shard_optimizer(torch.optim.AdamW(replicated.parameters(), fused=True), replicated)
    return Trained(replicated, workload, batch, optimizer)


def measure_computation(trained: Trained, num_steps: int) -> Computation:
    parameters = list(trained.replicated.parameters())
    came: list[list[float]] = [[] for _ in parameters]
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: came[i].append(time.perf_counter()))
        for i, parameter in enumerate(parameters)
    ]
    forwards, begins = [], []
    with trained.replicated.no_sync():
        trained.step(steps=False)
        for times in came:
            times.clear()
        for _ in range(num_steps):
            began, backward, _, _ = trained.step(steps=False)
            forwards.append(backward - began)
            begins.append(backward)
    for hook in hooks:
        hook.remove()
    ready = [median(t - b for t, b in zip(times, begins, strict=True)) for times in came]
    forward_s, num_bytes = median(forwards), sum(parameter.nbytes for parameter in parameters)
    trained.replicated.zero_grad()
    stepped = [trained.step() for _ in range(num_steps)]
    return Computation(
        ready_s=ready,
        needed_s=[forward_s * (1 - each / max(ready)) for each in ready],
        forward_s=forward_s,
        launch_s=LAUNCH_S,
        step_s_per_byte=median(ended - reduced for _, _, reduced, ended in stepped) / num_bytes,
    )


def times_of(plans: dict[str, Trained], rounds: int) -> dict[str, list[float]]:
    """The step of each round, by plan."""
    times: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(rounds):
        start = number % len(plans)
        for name in [*plans][start:] + [*plans][:start]:
            plans[name].step()  # fills the caches that the plan before it took
            began, _, _, ended = plans[name].step()
            times[name].append(ended - began)
    return times


def rows_of(arguments: argparse.Namespace, name: str) -> list[dict[str, object]]:
    set_link_model(LinkModel.from_rate(400e9, arguments.world_size))
    caps = list(map(float, arguments.caps.split(",")))
    fixed = {f"{cap:g} MiB": train(arguments, name, bucket_cap_mb=cap).steps(STEPS_OF_PLANS) for cap in caps}
    first = fixed[f"{caps[0]:g} MiB"]
    computation = measure_computation(first, arguments.rounds)
    specs = sorted((g for b in first.replicated.bucket_plan.buckets for g in b.gradients), key=lambda g: g.index)
    model = Model(gradients=specs, computation=computation, default_caps_bytes=(2**20,))
    rows: list[dict[str, object]] = []
    for rate in arguments.rates.split(","):
        bits = Rate.parse(rate).bits_per_second
        assert bits is not None
        link = LinkModel.from_rate(bits, arguments.world_size)
        set_link_model(link)
        share = (arguments.world_size - 1) / arguments.world_size
        half = Collective(latency_s=link.alpha_s, s_per_byte=share / link.bytes_per_second)
        whole = replace(half, s_per_byte=2 * half.s_per_byte)
        costs = computation.with_transfers(*([half, half] if arguments.sharded else [whole]))
        plans = fixed | {
            "optimal": with_plan(arguments, name, model, LeastTime(costs)).steps(STEPS_OF_PLANS),
            "auto": train(arguments, name, bucket_cap_mb="auto").steps(STEPS_OF_AUTO),
        }
        times = times_of(plans, arguments.rounds)
        best = min(fixed, key=lambda each: median(times[each]))
        for plan, trained in plans.items():
            bucket_plan, measured_s = trained.replicated.bucket_plan, median(times[plan])
            predicted_s = predict(loads_of(bucket_plan, costs), costs).step_s
            ratio, low, high = median_and_interval(a / b for a, b in zip(times[plan], times[best], strict=True))
            rows.append(
                {
                    "model": name,
                    "link": rate,
                    "transfer/alone": round(whole.s_per_byte * model.num_bytes / model.alone_s, 2),
                    "plan": plan,
                    "buckets": len(bucket_plan.buckets),
                    "step_ms": round(measured_s * 1e3, 2),
                    "to_best_cap": round(ratio, 4),
                    "from": round(low, 4),
                    "to": round(high, 4),
                    "predicted_ms": round(predicted_s * 1e3, 2),
                    "predicted/measured": round(predicted_s / measured_s, 3),
                }
            )
        report_rows(rows[-len(plans) :], None)
    return rows


def with_plan(arguments: argparse.Namespace, name: str, model: Model, planner: LeastTime) -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        model.plan(planner).save(path)
        return train(arguments, name, bucket_plan=path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt-medium,gpt-small,cnn,many-tiny")
    parser.add_argument("--rates", default="1gbit,2gbit,4gbit,40gbit")
    parser.add_argument("--caps", default="1,5,25,100", help="fixed capacities in MiB")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--world-size", type=int, default=2, help="simulated ranks")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sharded", action="store_true", help="with a sharded AdamW, whose step is timed too")
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    init_simulated_process_group(LinkModel.from_rate(400e9, arguments.world_size), torch.device("cpu"))
    rows = [row for name in arguments.models.split(",") for row in rows_of(arguments, name)]
    about = {"world_size": arguments.world_size, "backend": arguments.backend, "sharded": arguments.sharded}
    report_rows(rows, arguments.output, **about)


if __name__ == "__main__":
    main()
