"""Milliseconds a step, compared with ``torch.compile(DistributedDataParallel(model))`` in one run."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile, shard_optimizer
from lm.data import Batch
from lm.model import next_byte_loss
from lm.world import World


@dataclass
class Contender:
    """One way to train, with its own optimizers.

    Args:
        name: Its name in the table.
        model: The distributed model.
        optimizers: Its optimizers.
        seconds: Length of each timed step, that of the slowest rank.
        loss: This rank's loss of the last step, a scalar.
    """

    name: str
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    seconds: list[float] = field(default_factory=list)
    loss: Tensor | None = None

    def step(self, batch: Batch) -> None:
        loss, count = next_byte_loss(self.model, *batch)
        self.loss = loss / count
        self.loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def timed_step(self, batch: Batch, world: World) -> None:
        dist.barrier()
        start = time.perf_counter()
        self.step(batch)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=world.device)
        self.seconds.append(world.maximum(elapsed).item())


def compare(
    model: nn.Module,
    make_optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]],
    batches: Iterator[Batch],
    world: World,
    *,
    bucket_cap_mb: float,
    split: str,
    backend: str,
    steps: int,
    sharded: bool,
    warmup: int = 5,
) -> None:
    """Train two copies on the same batches, alternating step by step, and print a table.

    The speed of machines drifts, so only adjacent steps are compared. The first ``warmup`` pairs, which compile, are
    not timed.
    ``sharded``: our optimizers are sharded.
    """
    # Its default has a first bucket of 1 MiB, like ours. A capacity that is passed also holds for the first bucket.
    caps = {} if bucket_cap_mb == 25 else {"bucket_cap_mb": bucket_cap_mb}
    reference = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True, **caps)
    ours = ddp_compile(model, bucket_cap_mb=bucket_cap_mb, split=split, backend=backend)
    baseline = torch.compile(reference, backend=backend)
    contenders = [
        Contender("ddp_compile", ours, make_optimizers(ours)),
        Contender("torch.compile(DDP)", baseline, make_optimizers(baseline)),
    ]
    if sharded:
        shard_optimizer(contenders[0].optimizers, ours)
    world.say(f"Timing {steps} steps of each, after {warmup} to compile and warm up")
    for number in range(warmup + steps):
        batch = next(batches)
        for contender in contenders:
            if number < warmup:
                contender.step(batch)
            else:
                contender.timed_step(batch, world)
    world.say(ours.bucket_plan.format_table())
    world.say(_table(contenders, world))


def _table(contenders: list[Contender], world: World) -> str:
    baseline = statistics.median(contenders[-1].seconds)
    lines = [f"{'ms a step':<20}{'median':>10}{'quartiles':>20}{'ratio':>8}{'last loss':>12}"]
    for contender in contenders:
        low, median, high = statistics.quantiles(contender.seconds, n=4, method="inclusive")
        spread = f"{1000 * low:.1f} .. {1000 * high:.1f}"
        assert contender.loss is not None
        loss = world.mean(contender.loss).item()
        lines.append(f"{contender.name:<20}{1000 * median:>10.1f}{spread:>20}{median / baseline:>8.3f}{loss:>12.6f}")
    return "\n".join(lines)
