"""Steps with optimal boundaries beside fixed capacities, measured and predicted.

    python benchmarks/bench_planning.py [--models gpt-medium,gpt-small,cnn,many-tiny] [--rates 1gbit,2gbit,4gbit,40gbit]
        [--caps 1,5,25,100] [--seconds 90] [--sharded] [--output FILE.csv]

Each round times a forward and a backward of every plan once, so that a slow moment falls on all of them; with
``--sharded`` also the step of a sharded AdamW. One rank on a simulated link, whose transfers slow down no computation.

Predictions are from a report of ``model.measure()``, of the steps of the default capacity in the same rounds, and from
the latency and rate of the simulated link.

hidden = (alone + transfer - step) / (alone + transfer - least). "alone" is a step that waits for no transfer, by the
report; "transfer" one transfer of all gradients; and "least" the predicted step of the best boundaries if cuts and
launches cost nothing. Empty if boundaries can hide less than a twentieth of the step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Collection, Sequence
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
from ddp_compile.config import DEFAULT_CAP_MIB
from ddp_compile.plan.costs import Collective, Computation
from ddp_compile.plan.planner import LeastTime
from ddp_compile.plan.scenarios import Model
from ddp_compile.plan.schedule import loads_of, predict
from ddp_compile.report.costs import computation_of
from ddp_compile.validation.rates import Rate

#: Rate of a simulated link on which plans are agreed on, in bit/s.
FAST = 400e9
#: The plan that is measured for the predictions.
DEFAULT = f"{DEFAULT_CAP_MIB['cpu']:g} MiB"
FEWEST_ROUNDS = 11
#: Steps in which a plan is agreed on, packed again and compiled.
STEPS_OF_PLANS = 5


class Trained(NamedTuple):
    """A replicated model with its data."""

    replicated: Any
    workload: Workload
    batch: tuple[torch.Tensor, torch.Tensor]
    optimizer: torch.optim.Optimizer | None

    def step(self) -> tuple[float, float]:
        """When a step began, and when it ended."""
        self.replicated.zero_grad()
        inputs, targets = self.batch
        began = time.perf_counter()
        self.workload.loss(self.replicated(inputs), targets).backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return began, time.perf_counter()

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


class Rounds(NamedTuple):
    """What some rounds have measured."""

    times_s: dict[str, list[float]]  #: the step of each round, by plan
    computation: Computation  #: by a report of one of them, as for ``python -m ddp_compile plan --profile``

    def median_s(self, name: str) -> float:
        return median(self.times_s[name])


def rounds_of(plans: dict[str, Trained], seconds: float, arguments: argparse.Namespace) -> Rounds:
    """As many rounds as come to so many seconds, but at least `FEWEST_ROUNDS`. The default plan is measured."""
    began = time.perf_counter()
    for trained in plans.values():
        trained.step()
    rounds = max(FEWEST_ROUNDS, int(seconds / 2 / (time.perf_counter() - began)))
    measured = plans[DEFAULT]
    measurement = measured.replicated.measure(steps=2 * rounds)
    times_s: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(rounds):
        start = number % len(plans)
        for name in [*plans][start:] + [*plans][:start]:
            plans[name].step()  # fills the caches that the plan before it took
            began, ended = plans[name].step()
            times_s[name].append(ended - began)
    measured.step()  # the report is there with the next forward
    report = measurement.report()
    named = dict(measured.replicated.named_parameters())
    timed = replace(report, steps=report.steps[1::2])
    return Rounds(times_s, computation_of(timed, list(named), [parameter.nbytes for parameter in named.values()]))


def rows_of(arguments: argparse.Namespace, name: str) -> list[dict[str, object]]:
    caps = {float(cap) for cap in arguments.caps.split(",")} | {DEFAULT_CAP_MIB["cpu"], 25.0}
    fixed = {cap_name(cap): train(arguments, name, bucket_cap_mb=cap).steps(STEPS_OF_PLANS) for cap in sorted(caps)}
    rows: list[dict[str, object]] = []
    for rate in arguments.rates.split(","):
        whole = set_rate(rate, arguments.world_size)
        half = Collective(latency_s=whole.latency_s, s_per_byte=whole.s_per_byte / 2)
        transfers = (half, half, arguments.world_size) if arguments.sharded else (whole,)
        first = rounds_of({DEFAULT: fixed[DEFAULT]}, 0.0, arguments).computation
        specs = (g for b in fixed[DEFAULT].replicated.bucket_plan.buckets for g in b.gradients)
        model = Model(
            gradients=sorted(specs, key=lambda gradient: gradient.index),
            computation=first,
            default_caps_bytes=(2**20,),
        )
        planner = LeastTime(first.with_transfers(*transfers))
        plans = fixed | {
            "optimal": with_plan(arguments, name, model, planner).steps(STEPS_OF_PLANS),
        }
        rounds = rounds_of(plans, arguments.seconds, arguments)
        rows += rows_of_rounds(
            name, rate, plans, fixed, rounds, replace(model, computation=rounds.computation), transfers
        )
        report_rows(rows[-len(plans) :], None)
    return rows


def rows_of_rounds(
    name: str,
    rate: str,
    plans: dict[str, Trained],
    fixed: Collection[str],
    rounds: Rounds,
    model: Model,
    transfers: Sequence[Any],
) -> list[dict[str, object]]:
    """One row for each plan on one link."""
    costs = rounds.computation.with_transfers(*transfers)
    free = replace(costs, launch_s=0.0)
    least_s = predict(loads_of(model.plan(LeastTime(free)), free), free).step_s
    sent_s = sum(each.time_s(model.num_bytes) for each in (costs.reduce, costs.gather) if each is not None)
    alone_s = max(costs.ready_s) + costs.step_s_per_byte * model.num_bytes + costs.forward_s
    can_s = alone_s + sent_s - least_s
    best = min(fixed, key=rounds.median_s)
    rows: list[dict[str, object]] = []
    for plan, trained in plans.items():
        bucket_plan, step_s = trained.replicated.bucket_plan, rounds.median_s(plan)
        predicted_s = predict(loads_of(bucket_plan, costs), costs).step_s
        of_best, of_25 = (
            median_and_interval(a / b for a, b in zip(rounds.times_s[plan], rounds.times_s[other], strict=True))
            for other in (best, cap_name(25.0))
        )
        rows.append(
            {
                "model": name,
                "link": rate,
                "transfer/alone": round(sent_s / alone_s, 2),
                "plan": plan,
                "digest": bucket_plan.digest,
                "buckets": len(bucket_plan.buckets),
                "rounds": len(rounds.times_s[plan]),
                "step_ms": round(step_s * 1e3, 2),
                "to_best_cap": round(of_best[0], 4),
                "from": round(of_best[1], 4),
                "to": round(of_best[2], 4),
                "to_25": round(of_25[0], 4),
                "hidden": round((alone_s + sent_s - step_s) / can_s, 3) if can_s > 0.05 * step_s else "",
                "predicted_ms": round(predicted_s * 1e3, 2),
                "predicted/measured": round(predicted_s / step_s, 3),
            }
        )
    return rows


def cap_name(cap_mib: float) -> str:
    return f"{cap_mib:g} MiB"


def set_rate(rate: str, world_size: int) -> Collective:
    """Give the simulated link this rate; returns what an all-reduce costs on it."""
    bits = Rate.parse(rate).bits_per_second
    assert bits is not None
    link = LinkModel.from_rate(bits, world_size)
    set_link_model(link)
    share = (world_size - 1) / world_size
    return Collective(latency_s=link.alpha_s, s_per_byte=2 * share / link.bytes_per_second)


def with_plan(arguments: argparse.Namespace, name: str, model: Model, planner: LeastTime) -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        model.plan(planner).save(path)
        return train(arguments, name, bucket_plan=path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt-medium,gpt-small,cnn,many-tiny")
    parser.add_argument("--rates", default="1gbit,2gbit,4gbit,40gbit")
    parser.add_argument("--caps", default="1,5,25,100", help="fixed capacities in MiB; 5 and 25 are always among them")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--world-size", type=int, default=2, help="ranks of the simulated link")
    parser.add_argument(
        "--seconds", type=float, default=90.0, help=f"for each setting; at least {FEWEST_ROUNDS} rounds"
    )
    parser.add_argument("--sharded", action="store_true", help="with a sharded AdamW, whose step is timed too")
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    init_simulated_process_group(LinkModel.from_rate(FAST, arguments.world_size), torch.device("cpu"))
    rows = [row for name in arguments.models.split(",") for row in rows_of(arguments, name)]
    about = {"world_size": arguments.world_size, "backend": arguments.backend, "sharded": arguments.sharded}
    report_rows(rows, arguments.output, **about)


if __name__ == "__main__":
    main()
