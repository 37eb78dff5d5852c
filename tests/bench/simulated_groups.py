"""Simulated process groups for tests, and how long something takes in them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile.bench.simulated_link import LinkModel, init_simulated_process_group

CPU = torch.device("cpu")
WORLD_SIZE = 4
PAYLOAD_BYTES = 4000  # so few that writing them takes no time
#: An all-reduce of the payload takes this long.
SLOW_S = 0.040
SLOW = LinkModel(world_size=WORLD_SIZE, alpha_s=0.010, bytes_per_second=PAYLOAD_BYTES * 1.5 / 0.030)
FAST = LinkModel(world_size=WORLD_SIZE, alpha_s=0.0, bytes_per_second=1e12)


@contextmanager
def simulated_group(model: LinkModel, device: torch.device = CPU) -> Iterator[None]:
    torch._dynamo.reset()
    init_simulated_process_group(model, device)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def payload(device: torch.device = CPU) -> Tensor:
    return torch.ones(PAYLOAD_BYTES // 4, device=device)


def shortest_s(function: Callable[[], Any], num_calls: int = 5) -> float:
    """The call that other processes on the same cores disturbed least."""
    times = []
    for _ in range(num_calls):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)
