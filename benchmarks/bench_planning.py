"""Steps with ``bucket_cap_mb="auto"`` beside fixed capacities and optimal boundaries, measured and predicted.

    python benchmarks/bench_planning.py [--models gpt-medium,gpt-small,cnn,many-tiny] [--rates 1gbit,2gbit,4gbit,40gbit]
        [--caps 1,5,25,100] [--rounds 15] [--sharded] [--shaped] [--output FILE.csv]

Each round times a forward and a backward of every plan once, so that a slow moment falls on all of them; with
``--sharded`` also the step of a sharded AdamW. ``bucket_cap_mb="auto"`` first trains until its plan stays.

One rank on a simulated link, whose transfers slow down no computation; with ``--shaped`` two ranks, with one core each,
on a link between network namespaces, which needs root. Predictions are from a report of the default capacity: on a fast
simulated link with the numbers of the link to come, on a shaped one with all-reduces of several sizes.

hidden: the part of what any boundaries can hide that this plan hides, where "can" is the optimum if cuts and launches
cost nothing: 1 if the step is as long as predicted for that, 0 if it is as long as computation and transfer together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.bench.link import NamespacedLink
from ddp_compile.bench.report import report_rows
from ddp_compile.bench.results import median_and_interval
from ddp_compile.bench.settings import WorkloadSettings
from ddp_compile.bench.simulated_link import LinkModel, init_simulated_process_group, set_link_model
from ddp_compile.bench.workloads import Workload, make_workload
from ddp_compile.config import DEFAULT_CAP_MIB
from ddp_compile.features.automatic_plan import FIRST_MEASURED, NUM_MEASURED
from ddp_compile.plan.costs import Collective, Computation
from ddp_compile.plan.planner import LeastTime
from ddp_compile.plan.scenarios import Model
from ddp_compile.plan.schedule import loads_of, predict
from ddp_compile.report.costs import computation_of
from ddp_compile.runtime.comm.link_sweep import measure_link
from ddp_compile.validation.rates import Rate

#: Iterations until a new plan's buckets are launched early: up to the next agreement point.
NEXT_AGREEMENT = 28
#: After so many steps ``bucket_cap_mb="auto"`` has measured, planned, measured its plan, and perhaps gone back.
STEPS_OF_AUTO = FIRST_MEASURED + NUM_MEASURED + NEXT_AGREEMENT + NUM_MEASURED
#: Rate of a simulated link on which transfers take no time to speak of, in bit/s.
FAST = 400e9
#: Steps in which a plan is agreed on, packed again and compiled.
STEPS_OF_PLANS = 5


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
    """By a report of ``model.measure()``, as ``python -m ddp_compile plan --profile`` does."""
    measurement = trained.replicated.measure(steps=num_steps)
    trained.steps(num_steps + 1)
    named = dict(trained.replicated.named_parameters())
    return computation_of(measurement.report(), list(named), [parameter.nbytes for parameter in named.values()])


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
    link = SimulatedLink(arguments) if arguments.rank is None else ShapedLink(arguments)
    caps = list(map(float, arguments.caps.split(",")))
    link.set_rate(None)
    fixed = {f"{cap:g} MiB": train(arguments, name, bucket_cap_mb=cap).steps(STEPS_OF_PLANS) for cap in caps}
    default = fixed[f"{DEFAULT_CAP_MIB['cpu']:g} MiB"]
    computation = measure_computation(default, arguments.rounds)
    specs = sorted((g for b in default.replicated.bucket_plan.buckets for g in b.gradients), key=lambda g: g.index)
    model = Model(gradients=specs, computation=computation, default_caps_bytes=(2**20,))
    rows: list[dict[str, object]] = []
    for rate in arguments.rates.split(","):
        link.set_rate(rate)
        whole = link.all_reduce()
        half = Collective(latency_s=link.latency_of_half(whole), s_per_byte=whole.s_per_byte / 2)
        costs = computation.with_transfers(*([half, half] if arguments.sharded else [whole]))
        plans = fixed | {
            "optimal": with_plan(arguments, name, model, LeastTime(costs)).steps(STEPS_OF_PLANS),
            "auto": train(arguments, name, bucket_cap_mb="auto").steps(STEPS_OF_AUTO),
        }
        times = times_of(plans, arguments.rounds)
        alone_s = link.alone_s(default, arguments.rounds)
        free = replace(costs, launch_s=0.0)
        can_s = predict(loads_of(model.plan(LeastTime(free)), free), free).exposed_s
        transfer_s = whole.s_per_byte * model.num_bytes
        best = min(fixed, key=lambda each: median(times[each]))
        for plan, trained in plans.items():
            bucket_plan, measured_s = trained.replicated.bucket_plan, median(times[plan])
            predicted_s = predict(loads_of(bucket_plan, costs), costs).step_s
            ratio, low, high = median_and_interval(a / b for a, b in zip(times[plan], times[best], strict=True))
            of_25 = median(a / b for a, b in zip(times[plan], times.get("25 MiB", times[best]), strict=True))
            rows.append(
                {
                    "model": name,
                    "link": rate,
                    "transfer/alone": round(transfer_s / alone_s, 2),
                    "plan": plan,
                    "buckets": len(bucket_plan.buckets),
                    "step_ms": round(measured_s * 1e3, 2),
                    "to_best_cap": round(ratio, 4),
                    "from": round(low, 4),
                    "to": round(high, 4),
                    "to_25": round(of_25, 4),
                    "hidden": round((transfer_s - (measured_s - alone_s)) / (transfer_s - can_s), 3),
                    "predicted_ms": round(predicted_s * 1e3, 2),
                    "predicted/measured": round(predicted_s / measured_s, 3),
                }
            )
        if not arguments.rank:
            report_rows(rows[-len(plans) :], None)
    return rows


class SimulatedLink:
    """A link of one process, see `ddp_compile.bench.simulated_link`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.world_size = arguments.world_size
        self.model = LinkModel.from_rate(FAST, self.world_size)

    def set_rate(self, rate: str | None) -> None:
        bits = FAST if rate is None else Rate.parse(rate).bits_per_second
        assert bits is not None
        self.model = LinkModel.from_rate(bits, self.world_size)
        set_link_model(self.model)

    def all_reduce(self) -> Collective:
        share = (self.world_size - 1) / self.world_size
        return Collective(latency_s=self.model.alpha_s, s_per_byte=2 * share / self.model.bytes_per_second)

    def latency_of_half(self, whole: Collective) -> float:
        """Each transfer of a sharded optimizer has the latency of one collective here."""
        return whole.latency_s

    def alone_s(self, trained: Trained, rounds: int) -> float:
        """A step if transfers take no time."""
        present = self.model
        self.set_rate(None)
        alone = times_of({"alone": trained}, rounds)["alone"]
        set_link_model(present)
        return median(alone)


class ShapedLink:
    """The link that this rank's network namespace has."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._collective: Collective | None = None

    def set_rate(self, rate: str | None) -> None:
        """It has been set before this process began."""

    def all_reduce(self) -> Collective:
        group = dist.distributed_c10d._get_default_group()
        return measure_link(group, torch.device("cpu"))

    def latency_of_half(self, whole: Collective) -> float:
        return whole.latency_s / 2

    def alone_s(self, trained: Trained, rounds: int) -> float:
        """A step that sends nothing."""
        times = []
        for _ in range(rounds):
            with trained.replicated.no_sync():
                began, *_, ended = trained.step(steps=False)
            times.append(ended - began)
        trained.step()
        return median(times)


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
    parser.add_argument("--shaped", action="store_true", help="two ranks on a shaped link instead of a simulated one")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    is_launcher = arguments.shaped and arguments.rank is None
    rows = on_shaped_links(arguments) if is_launcher else rows_of_rank(arguments)
    about = {"world_size": arguments.world_size, "backend": arguments.backend, "sharded": arguments.sharded}
    if arguments.rank is None:
        report_rows(rows, arguments.output, **about)


def rows_of_rank(arguments: argparse.Namespace) -> list[dict[str, object]]:
    torch.set_num_threads(1)
    if arguments.rank is None:
        init_simulated_process_group(LinkModel.from_rate(FAST, arguments.world_size), torch.device("cpu"))
    else:
        where = f"file://{arguments.store}"
        dist.init_process_group("gloo", init_method=where, rank=arguments.rank, world_size=arguments.world_size)
    rows = [row for name in arguments.models.split(",") for row in rows_of(arguments, name)]
    if arguments.rank == 0:
        Path(f"{arguments.store}.json").write_text(json.dumps(rows))
    if arguments.rank is not None:
        dist.barrier()
        dist.destroy_process_group()
    return rows


def on_shaped_links(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Rows of rank 0, with processes of their own for each model and rate."""
    rows: list[dict[str, object]] = []
    cores = sorted(os.sched_getaffinity(0))
    with NamespacedLink(arguments.world_size) as link, tempfile.TemporaryDirectory() as folder:
        for number, (model, rate) in enumerate(product(arguments.models.split(","), arguments.rates.split(","))):
            link.shape(Rate.parse(rate))
            store = f"{folder}/store_{number}"
            words = [*sys.argv, "--models", model, "--rates", rate, "--store", store]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": link.interface, "OMP_NUM_THREADS": "1"}
            ranks = [
                subprocess.Popen(
                    [
                        *link.command_prefix(rank),
                        *("taskset", "--cpu-list", str(cores[rank % len(cores)])),
                        *(sys.executable, *words, "--rank", str(rank)),
                    ],
                    env=environment,
                )
                for rank in range(arguments.world_size)
            ]
            codes = [rank.wait() for rank in ranks]
            if any(codes):
                raise SystemExit(f"a rank failed with {model} at {rate}")
            rows += json.loads(Path(f"{store}.json").read_text())
    return rows


if __name__ == "__main__":
    main()
