"""Hooks that are registered after the forward, as in a ``with clipping():`` around the backward."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, loss_of, relative_difference
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")


def shrink(parameter: Tensor) -> None:
    parameter.grad.mul_(0.01)


def method_of(model: nn.Module, x: Tensor) -> Tensor:
    """A backward that starts at nothing that a call of the module has returned."""
    return loss_of(torch.tanh(sum(p.sum() for p in model.parameters()) * x))


@pytest.mark.parametrize(
    ("cap_mb", "calls_module"), only([(1e-4, True), (5, False)], itertools.product([1e-4, 5], [True, False]))
)
@on_ranks(2)
def test_hooks_registered_between_forward_and_backward(cap_mb: float, calls_module: bool) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(Mlp(7, 4))
    ours = ddp_compile(models[0], bucket_cap_mb=cap_mb, backend="aot_eager")
    theirs = DistributedDataParallel(models[1])
    worst = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, 7)
        for model in (ours, theirs):
            model.zero_grad()
            loss = loss_of(model(x)) if calls_module or step == 0 else method_of(model, x)
            if model is theirs and step and not calls_module:
                loss = loss + 0 * loss_of(model(x))  # it reduces nothing without a forward
            hooks = [parameter.register_post_accumulate_grad_hook(shrink) for parameter in model.parameters()]
            loss.backward()
            for hook in hooks:
                hook.remove()
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        worst.append(max(relative_difference(p.grad, q.grad) for p, q in pairs))
    assert max(worst) < 1e-5, worst
