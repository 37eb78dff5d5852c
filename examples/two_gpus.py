"""Train, look at the plan, measure, compare with DistributedDataParallel, and leave again.

    python examples/two_gpus.py

Two ranks on two GPUs, or on the CPU if there are fewer. `two_gpus.ipynb` does the same in a notebook. Ranks are
processes, so what they run is in this file, which they import.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile

NUM_RANKS = 2
HAS_GPUS = torch.cuda.device_count() >= NUM_RANKS
WIDTH = 4096 if HAS_GPUS else 512
BACKEND = os.environ.get("BACKEND", "inductor")  # what compiles each graph; "aot_eager" takes less time
CHECKPOINT = "two_gpus.pt"


def launch(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this file on every rank, as torchrun would; returns rank 0's result."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=NUM_RANKS, run_id="two_gpus", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", start_method="spawn", max_restarts=0,
    )  # fmt: skip
    return elastic_launch(config, on_a_rank)(function, arguments)[0]


def on_a_rank(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What each process does."""
    if HAS_GPUS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if HAS_GPUS else "gloo")
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()


def make_model(how: str) -> Any:
    """The model, replicated by "ddp_compile" or by "DistributedDataParallel"."""
    device = torch.device("cuda", torch.cuda.current_device()) if HAS_GPUS else torch.device("cpu")
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).to(device)
    if how == "ddp_compile":
        return ddp_compile(model, backend=BACKEND)
    return torch.compile(DistributedDataParallel(model, gradient_as_bucket_view=True), backend=BACKEND)


def steps_of(model: Any, num_steps: int) -> tuple[list[float], list[float]]:
    """Train; returns the losses, and the length of each step in ms."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())  # another batch on each rank
    losses, lengths_ms = [], []
    for _ in range(num_steps):
        start = time.perf_counter()
        x = torch.randn(64, WIDTH, generator=generator).to(device)
        loss: Tensor = nn.functional.mse_loss(model(x), x.abs())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        lengths_ms.append(1e3 * (time.perf_counter() - start))
    return losses, lengths_ms


def train(how: str, num_steps: int = 30) -> dict[str, Any]:
    """First and last loss, and the median step without the first ten, which compile."""
    losses, lengths_ms = steps_of(make_model(how), num_steps)
    return {"first loss": losses[0], "last loss": losses[-1], "ms a step": statistics.median(lengths_ms[10:])}


def look() -> str:
    """The plan, and what was done with it."""
    model = make_model("ddp_compile")
    steps_of(model, 2)
    return str(model.explain())


def measure() -> str:
    """What each bucket waited for, after three steps that compile."""
    model = make_model("ddp_compile")
    steps_of(model, 3)
    measurement = model.measure(steps=10)
    steps_of(model, 10)
    return str(measurement.report())


def leave() -> list[str]:
    """Turn the model back into a plain one, save it, and return the names in the checkpoint."""
    model = make_model("ddp_compile")
    steps_of(model, 2)
    plain = model.unwrap()
    if dist.get_rank() == 0:
        torch.save(plain.state_dict(), CHECKPOINT)
    return list(plain.state_dict())


if __name__ == "__main__":
    print(launch(look))
    print(launch(measure))
    for how in ("ddp_compile", "DistributedDataParallel"):
        print(how, launch(train, how))
    print(f"{CHECKPOINT}: {', '.join(launch(leave)[:2])}, ...")
