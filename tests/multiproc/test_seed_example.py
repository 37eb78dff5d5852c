"""The first example of DistributedDataParallel's own notes, with ddp_compile in its place: spawn, one layer, SGD."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from process_copies import context_of_copies
from torch import Tensor, nn

from ddp_compile import ddp_compile

SPLITS = ("forward", "backward")


def example(split: str) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(10, 10)
    ddp_model = ddp_compile(model, split=split, backend="aot_eager")
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)

    outputs = ddp_model(torch.randn(20, 10))
    labels = torch.randn(20, 10)
    loss_fn(outputs, labels).backward()
    optimizer.step()
    return ddp_model.state_dict()


def run_rank(rank: int, world_size: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{directory}/store", world_size), rank=rank, world_size=world_size
    )
    for split in SPLITS:
        torch.save(example(split), f"{directory}/rank_{rank}_{split}.pt")
    dist.destroy_process_group()


# As the example starts them, and as copies of a process that has imported torch, which are there at once.
@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.long), "forkserver"])
def test_spawned_example_ends_with_the_same_weights_on_every_rank(method: str, tmp_path: Path) -> None:
    world_size = 2
    context_of_copies()
    mp.start_processes(run_rank, (world_size, str(tmp_path)), world_size, start_method=method)
    torch.manual_seed(0)
    untrained = nn.Linear(10, 10).state_dict()
    for split in SPLITS:
        first, second = (torch.load(tmp_path / f"rank_{rank}_{split}.pt") for rank in range(world_size))
        assert list(first) == ["weight", "bias"]
        for name, trained in first.items():
            assert torch.equal(trained, second[name])
            assert not torch.equal(trained, untrained[name])
