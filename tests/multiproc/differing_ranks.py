"""The model of tests whose ranks do different things, and what one of them may do with it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from models import Mlp, loss_of
from torch import Tensor, nn

from ddp_compile import ddp_compile

WIDTH = 8


def make_model(group: dist.ProcessGroup | None = None, **settings: Any) -> nn.Module:
    torch.manual_seed(3)
    settings = {"backend": "eager", "bucket_cap_mb": 4e-4, **settings}
    return ddp_compile(Mlp(width=WIDTH, num_layers=2), process_group=group, **settings)


def some_rows() -> Tensor:
    return torch.randn(4, WIDTH)


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(some_rows())
    model.train()


def evaluate_with_gradients(model: nn.Module) -> None:
    model.eval()
    model(some_rows())
    model.train()


def with_batch_norm() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def forward_and_backward(model: nn.Module) -> None:
    loss_of(model(some_rows())).backward()
