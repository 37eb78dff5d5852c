"""Two ranks on one CUDA device, over gloo, on streams of their own: the same training as on the CPU."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from device_tensors import on_gpu
from torch import Tensor, nn

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.algorithms import AlgorithmConfig, ByteGrad, Decentralized, DiLoCo, GradientAllReduce, LocalSGD

pytestmark = on_gpu

WIDTH = 64

ALGORITHMS: dict[str, AlgorithmConfig] = {
    "all-reduce": GradientAllReduce(),
    "wire dtype": GradientAllReduce(wire_dtype=torch.bfloat16),
    "ByteGrad": ByteGrad(),
    "decentralized": Decentralized(),
    "local SGD": LocalSGD(period=2),
    "DiLoCo": DiLoCo(sync_every=2, fragments=2, fragment_sync_delay=1, fragment_update_alpha=0.5),
    "sharded": GradientAllReduce(),
}


def train(rank: int, folder: str, name: str, device: str) -> None:
    """Replicated on the default stream, trained on another one; writes the final parameters."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store_{device}"
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))).to(device)
    settings: dict[str, Any] = {"bucket_cap_mb": 0.01, "backend": "aot_eager", "split": "backward"}
    model = ddp_compile(module, algorithm=ALGORITHMS[name], **settings)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name == "sharded":
        optimizer = shard_optimizer(optimizer, model)
    if device == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            steps(model, optimizer, rank, device)
        torch.cuda.current_stream().wait_stream(side)
    else:
        steps(model, optimizer, rank, device)
    state = {key: value.cpu() for key, value in model.state_dict().items()}
    torch.save(state, f"{folder}/{device}_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, device: str) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(16, WIDTH, generator=generator).to(device)).square().mean().backward()
        optimizer.step()


def trained(folder: Path, name: str, device: str) -> list[dict[str, Tensor]]:
    mp.spawn(train, (str(folder), name, device), nprocs=2)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{device}_{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_training_on_a_side_stream_is_that_of_the_cpu(name: str, tmp_path: Path) -> None:
    on_device, on_cpu = (trained(tmp_path, name, device) for device in ("cuda", "cpu"))
    for ours, theirs in zip(on_device, on_cpu, strict=True):
        for key, value in ours.items():
            torch.testing.assert_close(value, theirs[key], rtol=1e-2, atol=1e-3)
