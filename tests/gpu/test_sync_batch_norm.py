"""torch's SyncBatchNorm in a replicated module, which computes on CUDA devices only. Never run yet."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_tensors import on_gpu
from rank_pool import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile

pytestmark = [*on_gpu, pytest.mark.usefixtures("each_split")]

ROWS, WIDTH = 6, 17


def make(device: torch.device, synchronized: bool = True) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    return (nn.SyncBatchNorm.convert_sync_batchnorm(model) if synchronized else model).to(device)


def largest_differences() -> tuple[float, float]:
    """To DistributedDataParallel's gradients and statistics, and to those of one process with the whole batch.

    Ranks share a device if there are fewer devices; gloo allows that, unlike NCCL.
    """
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    ours: Any = ddp_compile(make(device), bucket_cap_mb=0.0005, backend="aot_eager")
    theirs, alone = DistributedDataParallel(make(device)), make(device, synchronized=False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (ours, theirs, alone)]
    to_ddp, to_whole = 0.0, 0.0
    for step in range(5):
        torch.manual_seed(step)
        x = torch.randn(2 * ROWS, WIDTH).to(device)
        own = x[rank * ROWS : (rank + 1) * ROWS]
        for model, batch, optimizer in zip((ours, theirs, alone), (own, own, x), optimizers, strict=True):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        found, expected, whole = (
            [*(p.grad for p in each.parameters()), *each.buffers()] for each in (ours, theirs.module, alone)
        )
        to_ddp = max(to_ddp, *(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)))
        to_whole = max(to_whole, *(float((a - b).abs().max()) for a, b in zip(found, whole, strict=True)))
    return to_ddp, to_whole


def test_sync_batch_norm_matches_ddp(ranks: Ranks) -> None:
    for to_ddp, to_whole in ranks(2).run(largest_differences):
        assert to_ddp < 1e-6
        assert to_whole < 1e-4
