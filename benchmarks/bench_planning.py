"""Predicted steps beside measured ones, on a simulated link, for capacities, the optimal boundaries, and "auto".

    python benchmarks/bench_planning.py --rates 1gbit,4gbit,40gbit --caps 1,5,25 --rounds 15

When gradients are ready is measured in backwards that send nothing. Each round times a step of every plan once, so that
a slow moment falls on all of them. ``bucket_cap_mb="auto"`` first trains until its plan stays.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from ddp_compile import ddp_compile
from ddp_compile.bench.simulated_link import LinkModel, init_simulated_process_group, set_link_model
from ddp_compile.bench.workloads import GPT
from ddp_compile.plan.costs import Collective, Computation
from ddp_compile.plan.planner import LeastTime
from ddp_compile.plan.scenarios import Model
from ddp_compile.plan.schedule import loads_of, predict
from ddp_compile.validation.rates import Rate

#: Steps after which ``bucket_cap_mb="auto"`` has measured, planned, and measured its plan.
STEPS_OF_AUTO = 32
WORLD_SIZE = 8
#: Of a launch, by the hooks and threads of one process.
LAUNCH_S = 1e-4


def make() -> nn.Module:
    torch.manual_seed(0)
    return GPT(depth=6, width=384, vocabulary=4096, length=128)


def step(model: Any, tokens: torch.Tensor) -> tuple[float, float, float]:
    """When a step began, its backward began, and it ended."""
    began = time.perf_counter()
    loss = model(tokens).square().mean()
    backward = time.perf_counter()
    loss.backward()
    return began, backward, time.perf_counter()


def measure_computation(model: Any, tokens: torch.Tensor, num_steps: int) -> Computation:
    parameters = list(model.parameters())
    came: list[list[float]] = [[] for _ in parameters]
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: came[i].append(time.perf_counter()))
        for i, parameter in enumerate(parameters)
    ]
    forwards, begins = [], []
    with model.no_sync():
        for _ in range(num_steps):
            model.zero_grad()
            began, backward, _ = step(model, tokens)
            forwards.append(backward - began)
            begins.append(backward)
    for hook in hooks:
        hook.remove()
    ready = [median(t - b for t, b in zip(times, begins, strict=True)) for times in came]
    return Computation(ready_s=ready, needed_s=[0.0] * len(ready), forward_s=median(forwards), launch_s=LAUNCH_S)


def times_of(models: Sequence[Any], tokens: torch.Tensor, rounds: int) -> list[float]:
    """Median step of each model."""
    times: list[list[float]] = [[] for _ in models]
    for number in range(rounds + 2):
        for model, found in zip(models, times, strict=True):
            model.zero_grad()
            began, _, ended = step(model, tokens)
            if number >= 2:  # plans are agreed on, and tails packed again
                found.append(ended - began)
    return [median(found) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="1gbit,4gbit,40gbit")
    parser.add_argument("--caps", default="1,5,25", help="fixed capacities in MiB")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    links = {text: Rate.parse(text).bits_per_second for text in arguments.rates.split(",")}
    init_simulated_process_group(LinkModel.from_rate(400e9, WORLD_SIZE), torch.device("cpu"))
    tokens = torch.randint(4096, (4, 128))
    first: Any = ddp_compile(make(), backend="eager")
    measure_computation(first, tokens, 2)
    computation = measure_computation(first, tokens, arguments.rounds)
    specs = sorted((g for bucket in first.bucket_plan.buckets for g in bucket.gradients), key=lambda g: g.index)
    model = Model(gradients=specs, computation=computation, default_caps_bytes=(2**20,))
    rows = []
    for text, bits in links.items():
        assert bits is not None
        link = LinkModel.from_rate(bits, WORLD_SIZE)
        set_link_model(link)
        share = 2 * (WORLD_SIZE - 1) / WORLD_SIZE
        reduce = Collective(latency_s=link.alpha_s, s_per_byte=share / link.bytes_per_second)
        costs = computation.with_transfers(reduce)
        models: dict[str, Any] = {
            f"{cap:g} MiB": ddp_compile(make(), backend="eager", bucket_cap_mb=cap)
            for cap in map(float, arguments.caps.split(","))
        }
        models["optimal"] = with_plan(model, LeastTime(costs))
        models["auto"] = ddp_compile(make(), backend="eager", bucket_cap_mb="auto")
        for _ in range(STEPS_OF_AUTO):
            models["auto"].zero_grad()
            step(models["auto"], tokens)
        measured = times_of(list(models.values()), tokens, arguments.rounds)
        for (name, trained), measured_s in zip(models.items(), measured, strict=True):
            predicted = predict(loads_of(trained.bucket_plan, costs), costs)
            rows.append(
                {
                    "link": text,
                    "buckets": name,
                    "number": len(trained.bucket_plan.buckets),
                    "predicted ms": predicted.step_s * 1e3,
                    "measured ms": measured_s * 1e3,
                    "ratio": predicted.step_s / measured_s,
                }
            )
    print(f"{len(specs)} gradients, {model.num_bytes / 2**20:.1f} MiB, {model.alone_s * 1e3:.1f} ms a step alone")
    print(tabulate(rows, headers="keys", floatfmt=".2f"))


def with_plan(model: Model, planner: LeastTime) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        model.plan(planner).save(path)
        return ddp_compile(make(), backend="eager", bucket_plan=path)


if __name__ == "__main__":
    main()
