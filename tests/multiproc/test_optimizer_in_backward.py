"""Optimizers that step inside ``backward()``: the parameters are those that DistributedDataParallel trains."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile

Ranks = Callable[[int], RankPool]
WIDTH = 33


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def apply(module: nn.Sequential, optimizer: Any, which: int, **arguments: Any) -> None:
    _apply_optimizer_in_backward(optimizer, module[which].parameters(), arguments)


def applied(module: nn.Sequential) -> tuple[Any, Callable[[], None]]:
    """One before the module is replicated, one after it; the last layer is left to an ordinary optimizer."""
    apply(module, torch.optim.Adam, 0, lr=0.01)
    model = ddp_compile_(module)
    apply(module, torch.optim.SGD, 2, lr=0.1, momentum=0.9)
    return model, nothing


def applied_by_hand(module: nn.Sequential) -> tuple[Any, Callable[[], None]]:
    """DistributedDataParallel's own way needs a GPU, even for parameters on the CPU."""
    adam = torch.optim.Adam(module[0].parameters(), lr=0.01)
    sgd = torch.optim.SGD(module[2].parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        for optimizer in (adam, sgd):
            optimizer.step()
            optimizer.zero_grad()

    return DistributedDataParallel(module), step


def fused(module: nn.Sequential, wrap: Callable[..., Any] = DistributedDataParallel) -> tuple[Any, Callable[[], None]]:
    model = wrap(module)
    chosen = [*module[0].parameters(), *module[2].parameters()]
    model._register_fused_optim(torch.optim.SGD, 0.1, optim_params=chosen, momentum=0.9)
    return model, nothing


def nothing() -> None:
    return None


def ddp_compile_(module: nn.Module) -> Any:
    return ddp_compile(module, bucket_cap_mb=0.005, backend="aot_eager")


WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "applied": (applied, applied_by_hand),
    "fused": (lambda module: fused(module, ddp_compile_), fused),
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_parameters_are_those_of_ddp(way: str, split: str, each_split: str) -> None:
    modules = make(), make()
    replicated = [make_model(module) for make_model, module in zip(WAYS[way], modules, strict=True)]
    optimizers = [torch.optim.SGD(module[4].parameters(), lr=0.1) for module in modules]
    worst, gone = 0.0, []
    for step in range(5):
        for (model, step_by_hand), module, optimizer in zip(replicated, modules, optimizers, strict=True):
            for micro_step in range(2):
                seed = 100 * step + 10 * micro_step + dist.get_rank()
                x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))
                with model.no_sync() if micro_step == 0 else nullcontext():
                    loss_of(model(x)).backward()
            step_by_hand()
            optimizer.step()
            gone.append([parameter.grad is None for parameter in module.parameters()])
            module.zero_grad()
        pairs = zip(*(module.parameters() for module in modules), strict=True)
        worst = max([worst, *(relative_difference(p.detach(), q.detach()) for p, q in pairs)])
    assert gone == [gone[0]] * 10
    gone = gone[0]
    assert worst < 1e-6
    assert gone == ([True] * 4 + [False] * 2 if way == "applied" else [False] * 6)


def test_parameters_of_another_module_are_refused(single_rank_group: None) -> None:
    model: Any = ddp_compile(make(), backend="eager")
    with pytest.raises(ValueError, match="optim_params has parameters that this module does not reduce"):
        model._register_fused_optim(torch.optim.SGD, 0.1, optim_params=nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError):  # torch's own
        model._register_fused_optim(torch.optim.LBFGS)
