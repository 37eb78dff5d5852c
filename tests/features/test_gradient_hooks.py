"""Hooks on parameters and their AccumulateGrad nodes, and optimizers that step inside ``backward()``, as with DDP."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import own_batch, pair, seeded, train_beside
from models import Mlp, largest, loss_of, relative_difference
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile


def shrink(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.01)  # type: ignore[union-attr]


# Hooks that are registered after the forward, as in a `with clipping():` around the backward.


@pytest.mark.parametrize(("cap_mb", "calls_module"), [(1e-4, True), (5, False)])
@pytest.mark.usefixtures("each_split")
@on_ranks(2)
def test_hooks_after_the_forward(cap_mb: float, calls_module: bool) -> None:
    """Without a call of the module, a backward does not start at the module's outputs."""
    models = pair(lambda: Mlp(7, 4), bucket_cap_mb=cap_mb)

    def step_of(model: nn.Module, x: Tensor, step: int) -> None:
        if calls_module or step == 0:
            loss = loss_of(model(x))
        else:
            loss = loss_of(torch.tanh(sum(p.sum() for p in model.parameters()) * x))
            if model is models[1]:
                loss = loss + 0 * loss_of(model(x))  # it reduces nothing without a forward
        hooks = [parameter.register_post_accumulate_grad_hook(shrink) for parameter in model.parameters()]
        loss.backward()
        for hook in hooks:
            hook.remove()

    assert largest(train_beside(models, step_of, width=7)) < 1e-5


WIDTH = 33


def three_layers() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def wrap(module: nn.Module) -> Any:
    return ddp_compile(module, bucket_cap_mb=0.005, backend="aot_eager")


def applied(module: nn.Sequential) -> tuple[Any, Callable[[], None]]:
    """One before the module is replicated, one after it; the last layer is left to an ordinary optimizer."""
    _apply_optimizer_in_backward(torch.optim.Adam, module[0].parameters(), {"lr": 0.01})
    model = wrap(module)
    _apply_optimizer_in_backward(torch.optim.SGD, module[2].parameters(), {"lr": 0.1, "momentum": 0.9})
    return model, lambda: None


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
    return model, lambda: None


WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "applied": (applied, applied_by_hand),
    "fused": (lambda module: fused(module, wrap), fused),
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_steps_in_the_backward(way: str, split: str, each_split: str) -> None:
    modules = seeded(three_layers), seeded(three_layers)
    replicated = [make_model(module) for make_model, module in zip(WAYS[way], modules, strict=True)]
    optimizers = [torch.optim.SGD(module[4].parameters(), lr=0.1) for module in modules]
    for step in range(5):
        for (model, step_by_hand), module, optimizer in zip(replicated, modules, optimizers, strict=True):
            for micro_step in range(2):
                with model.no_sync() if micro_step == 0 else nullcontext():
                    loss_of(model(own_batch(10 * step + micro_step, WIDTH, 6))).backward()
            step_by_hand()
            optimizer.step()
            gone = [parameter.grad is None for parameter in module.parameters()]
            assert gone == ([True] * 4 + [False] * 2 if way == "applied" else [False] * 6)
            module.zero_grad()
        assert largest(map(relative_difference, *(list(module.parameters()) for module in modules))) < 1e-6


def test_fused_optim_of_another_module(single_rank_group: None) -> None:
    model: Any = ddp_compile(three_layers(), backend="eager")
    with pytest.raises(ValueError, match="optim_params has parameters that this module does not reduce"):
        model._register_fused_optim(torch.optim.SGD, 0.1, optim_params=nn.Linear(2, 2).parameters())


@on_ranks(2, eagerly=True)
def test_no_step_by_gradients_that_are_not_reduced() -> None:
    """A backward without a forward brings gradients of a bucket that lacks others."""
    torch.manual_seed(0)
    model: Any = ddp_compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), backend="eager")
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    for step in range(2):
        model(torch.randn(2, 4) + dist.get_rank()).sum().backward()
        before = model[0].weight.detach().clone()
        model[0](torch.randn(2, 4) + dist.get_rank()).sum().backward()
        assert torch.equal(model[0].weight, before) and model[0].weight.grad is not None, step
