"""README's calls, as type checkers read them in strict mode. Not run; `make lint` checks it.

Where an error is expected, a comment names it, and one that nothing needs is an error itself.
"""

from __future__ import annotations

import os
from typing import assert_type

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_compile import ddp_compile, explain, is_replicated, no_sync, shard_optimizer, unwrap


class MyModel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x

    def generate(self, x: Tensor) -> Tensor:
        return x


def use() -> None:
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    torch.manual_seed(0)  # the same data on every rank; the sampler gives each rank its part
    inputs = torch.randn(4096, 10)
    data = TensorDataset(inputs, inputs.argmax(dim=1))
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))

    model = nn.Sequential(nn.Linear(10, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    model = ddp_compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for step, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 16 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


def settings(model: MyModel, mesh: DeviceMesh) -> None:
    model = ddp_compile(model, bucket_cap_mb=25, mode="max-autotune")
    model = ddp_compile(model, device_mesh=mesh["dp"], split="backward", static_graph=True)
    model = ddp_compile(model, bucket_cap_mb=[1, 25], options={"triton.cudagraphs": True}, compile_evaluation=False)
    model = ddp_compile(model, regions="auto")
    model = ddp_compile(model, regions=[MyModel])
    assert_type(model, MyModel)


def functions(model: MyModel, optimizer: torch.optim.AdamW, x: Tensor) -> None:
    with no_sync(model):
        model(x).sum().backward()
    assert_type(shard_optimizer(optimizer, model), torch.optim.AdamW)
    print(explain(model))
    assert_type(unwrap(model), MyModel)


def methods(model: MyModel, x: Tensor) -> None:
    assert is_replicated(model)
    with model.no_sync():
        model.generate(x)
    print(model.bucket_plan.format_table(), model.explain())
    model.register_comm_hook(None, bf16_compress_hook)
    model.require_backward_grad_sync = False


def refused(model: MyModel) -> None:
    ddp_compile(model, find_unused_parameter=True)  # type: ignore[arg-type]
    ddp_compile(model, device_ids=[0])  # type: ignore[arg-type]
    ddp_compile(model, [0])  # type: ignore[arg-type]
    ddp_compile(model, split="sideways")  # type: ignore[arg-type]
    ddp_compile(model, compile_evaluation="never")  # type: ignore[arg-type]
    ddp_compile(model, regions=[model])  # type: ignore[list-item]
    ddp_compile(MyModel)  # type: ignore[type-var]
    unwrap(3)  # type: ignore[type-var]
