"""Training beside the plain module, whose gradients the test averages itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models import relative_difference
from torch import Tensor, nn

from ddp_compile import ddp_compile

Step = Callable[[Any, Tensor, int], None]
WIDTH = 33
CAP_MB = 0.003  # less than a layer


def train(make: Callable[[], nn.Module], step_of: Step, num_steps: int = 5, **settings: Any) -> list[float]:
    """For each step the largest relative difference of a gradient to the mean of the plain module's."""
    torch.manual_seed(3)
    plain = make()
    model = ddp_compile(copy.deepcopy(plain), bucket_cap_mb=CAP_MB, backend="aot_eager", **settings)
    differences = []
    for step in range(num_steps):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(6, WIDTH)
        for each in (model, plain):
            each.zero_grad()
            step_of(each, x, step)
        worst = 0.0
        for ours, alone in zip(model.parameters(), plain.parameters(), strict=True):
            mean = torch.zeros_like(alone) if alone.grad is None else alone.grad
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            found = torch.zeros_like(mean) if ours.grad is None else ours.grad
            worst = max(worst, relative_difference(found, mean) if mean.any() else float(found.abs().max()))
        differences.append(worst)
    assert model._ddp_compile_state.compiler.failures == []
    return differences
