"""Averages of parameters: over steps in a second model, and over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

Ranks = Callable[[int], RankPool]
WIDTH = 9


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def pair() -> tuple[Any, Any]:
    return ddp_compile(Net(), backend="aot_eager", bucket_cap_mb=0.0005), DistributedDataParallel(Net())


def own_batch(step: int) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, WIDTH)


def are_equal(ours: nn.Module, theirs: nn.Module) -> bool:
    left, right = [*ours.parameters(), *ours.buffers()], [*theirs.parameters(), *theirs.buffers()]
    return len(left) == len(right) and all(map(torch.equal, left, right))


def is_same_everywhere(tensor: Tensor) -> bool:
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor.detach())
    return all(torch.equal(each, tensors[0]) for each in tensors)


@on_ranks(2)
def test_a_model_averaged_over_steps_is_ddps() -> None:
    models = pair()
    settings: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}
    averages = [[AveragedModel(each, **given) for each in models] for given in ({}, settings)]
    assert type(averages[0][0].module) is Net  # neither replicated nor compiled
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    for step in range(5):
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(own_batch(step)).square().mean().backward()
            optimizer.step()
            for kind in averages:
                kind[i].update_parameters(model)
        for ours, theirs in averages:
            assert are_equal(ours.module, theirs.module.module), step
        if step == 2:  # a copy is a module of its own: what it is used for changes nothing of the training
            own = [kind[0] for kind in averages]
            assert all(torch.isfinite(average.eval()(own_batch(9))).all() for average in own)
            own[0].module(own_batch(9)).sum().backward()
    for ours, theirs in averages:
        for average in (ours, theirs):
            update_bn([own_batch(20), own_batch(21)], average)
        assert torch.equal(ours.eval()(own_batch(30)), theirs.eval()(own_batch(30)))
    again = ddp_compile(copy.deepcopy(averages[1][0].module), backend="aot_eager")  # averages may be trained on
    again(own_batch(40)).sum().backward()
    assert all(parameter.grad is not None for parameter in again.parameters())


@on_ranks(2)
def test_models_averaged_over_ranks_are_ddps() -> None:
    for make_averager in (
        lambda: PeriodicModelAverager(period=2, warmup_steps=2),
        lambda: HierarchicalModelAverager({2: 2}, warmup_steps=2),
    ):
        models = pair()
        optimizers = []
        for model in models:
            state = PostLocalSGDState(process_group=None, subgroup=dist.new_subgroups(1)[0], start_localSGD_iter=2)
            model.register_comm_hook(state, post_localSGD_hook)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizers.append(PostLocalSGDOptimizer(inner, make_averager()))
        drifted = False
        for step in range(7):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(own_batch(step)).square().mean().backward()
                optimizer.step()
            assert are_equal(models[0], models[1].module), step
            drifted = drifted or not is_same_everywhere(next(models[0].parameters()))
        assert drifted
