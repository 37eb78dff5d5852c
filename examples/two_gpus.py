"""Train, look at the plan, measure, compare with DistributedDataParallel, and leave again.

    python examples/two_gpus.py

Two ranks on two GPUs; with fewer, two ranks on the CPU. `two_gpus.ipynb` does the same in a notebook. Ranks are
processes, so what they run is in this file, which they import.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.compile_fx  # before ranks are forked, which otherwise load it for seconds each
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile

NUM_RANKS = 2
HAS_GPUS = torch.cuda.device_count() >= NUM_RANKS
WIDTH = 4096 if HAS_GPUS else 512
BACKEND = os.environ.get("BACKEND", "inductor")  # what compiles each graph; "aot_eager" takes less time
CAP_MIB = 100 if HAS_GPUS else 2  # of both
CHECKPOINT = "two_gpus.pt"


def launch(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this file on every rank, as torchrun would; returns rank 0's result."""
    start_method = "spawn" if HAS_GPUS else "fork"  # CUDA does not survive a fork, which is faster
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=NUM_RANKS, run_id="two_gpus", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", start_method=start_method, max_restarts=0,
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


class Mlp(nn.Module):
    """With a forward of its own: torch.compile(DistributedDataParallel(nn.Sequential(...))) compiles nothing."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


def make_model(how: str) -> Any:
    """The model, replicated by "ddp_compile" or by "DistributedDataParallel"."""
    device = torch.device("cuda", torch.cuda.current_device()) if HAS_GPUS else torch.device("cpu")
    torch.manual_seed(0)
    model = Mlp(8).to(device)
    if how == "ddp_compile":
        return ddp_compile(model, bucket_cap_mb=CAP_MIB, backend=BACKEND)
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP_MIB, gradient_as_bucket_view=True)
    return torch.compile(ddp, backend=BACKEND)


def steps_of(model: Any, num_steps: int) -> tuple[list[float], list[float]]:
    """Train; returns the losses, and the length of each step in ms."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())  # different data on each rank
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


def look() -> str:
    """What was done with the model, and then, over ten steps, what each bucket waited for."""
    model = make_model("ddp_compile")
    steps_of(model, 3)
    measurement = model.measure(steps=10)
    steps_of(model, 10)
    return f"{model.explain()}\n\n{measurement.report()}"


def compare(num_steps: int = 30) -> list[str]:
    """First and last loss, the median step time without the first ten (warm-up, compilation), and compiled graphs."""
    lines = []
    for how in ("ddp_compile", "DistributedDataParallel"):
        torch._dynamo.reset()
        losses, lengths_ms = steps_of(make_model(how), num_steps)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        median = statistics.median(lengths_ms[10:])
        lines.append(f"{how}: losses {losses[0]:.6f} to {losses[-1]:.6f}, {median:.1f} ms a step, {graphs} graphs")
    return lines


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
    print("\n".join(launch(compare)))
    print(f"{CHECKPOINT}: {', '.join(launch(leave)[:2])}, ...")
