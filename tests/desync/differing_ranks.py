"""The model of tests whose ranks do different things, and what one of them may do with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from models import Mlp, loss_of
from torch import Tensor, nn

from ddp_compile import ddp_compile

WIDTH = 8
TIMEOUT_S = 5.0  # a rank's other work must fit in, with other tests running


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


def with_batch_norm() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def forward_and_backward(model: nn.Module) -> None:
    loss_of(model(some_rows())).backward()


def run_and_meet(scenario: Callable[[dist.ProcessGroup], None], compiles: bool = False) -> str:
    """What the scenario raised on this rank, in a group of short timeout; the ranks leave it together."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    started = time.monotonic()
    try:
        # What a rank does before it waits is rarely a matter of compiling, which would take more of the timeout.
        with torch.compiler.set_stance("default" if compiles else "force_eager"):
            scenario(group)
        outcome = "nothing"
    except Exception as error:
        assert time.monotonic() - started < 30
        outcome = f"{type(error).__name__}: {error}"
    dist.barrier()
    return outcome
