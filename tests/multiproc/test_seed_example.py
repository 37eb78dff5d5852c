"""The first example of DistributedDataParallel's own notes, with ddp_compile in its place: spawn, one layer, SGD."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from ddp_compile import ddp_compile


def example(rank: int, world_size: int, directory: str, split: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{directory}/store", world_size), rank=rank, world_size=world_size
    )
    torch.manual_seed(rank)
    model = nn.Linear(10, 10)
    ddp_model = ddp_compile(model, split=split, backend="aot_eager")
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)

    outputs = ddp_model(torch.randn(20, 10))
    labels = torch.randn(20, 10)
    loss_fn(outputs, labels).backward()
    optimizer.step()
    torch.save(ddp_model.state_dict(), f"{directory}/rank_{rank}.pt")
    dist.destroy_process_group()


def test_spawned_example_ends_with_the_same_weights_on_every_rank(tmp_path: Path, split: str) -> None:
    world_size = 2
    mp.spawn(example, args=(world_size, str(tmp_path), split), nprocs=world_size, join=True)
    first, second = (torch.load(os.path.join(tmp_path, f"rank_{rank}.pt")) for rank in range(world_size))
    assert list(first) == ["weight", "bias"]
    torch.manual_seed(0)
    untrained = nn.Linear(10, 10)
    for name, trained in first.items():
        assert torch.equal(trained, second[name])
        assert not torch.equal(trained, untrained.state_dict()[name])
