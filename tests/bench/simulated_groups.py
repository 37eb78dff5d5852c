"""Simulated process groups for tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ddp_compile.bench.simulated_link import LinkModel, init_simulated_process_group

WORLD_SIZE = 4
PAYLOAD_BYTES = 4000  # so few that writing them takes no time
#: An all-reduce of the payload takes this long.
SLOW_S = 0.040
SLOW = LinkModel(world_size=WORLD_SIZE, alpha_s=0.010, bytes_per_second=PAYLOAD_BYTES * 1.5 / 0.030)
FAST = LinkModel(world_size=WORLD_SIZE, alpha_s=0.0, bytes_per_second=1e12)


@contextmanager
def simulated_group(model: LinkModel) -> Iterator[None]:
    torch._dynamo.reset()
    init_simulated_process_group(model, torch.device("cpu"))
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
