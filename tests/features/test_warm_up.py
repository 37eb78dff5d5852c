"""``model.warm_up`` compiles and changes nothing, and the ranks meet after it."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import flat_of, own_batch, seeded
from in_ci import only
from models import loss_of
from rank_pool import on_ranks
from torch import Tensor, nn

from ddp_compile import RanksDifferError, ReplicationError, ddp_compile
from ddp_compile.sharded_optimizer import shard_optimizer

WIDTH = 9

WAYS: dict[str, dict[str, Any]] = {
    "forward split": {"split": "forward"},
    "backward split": {"split": "backward"},
    "static graph": {"static_graph": True, "split": "backward"},
    "unused": {"find_unused_parameters": True},
    "regions": {"regions": [nn.Linear]},
    "inductor": {"backend": "inductor"},
}


class Net(nn.Module):
    """With a buffer that changes, random numbers, and a parameter that the first forward alone does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 20), nn.BatchNorm1d(20), nn.Dropout(0.3), nn.Linear(20, WIDTH))
        self.late = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, scale: bool = True) -> Tensor:
        y: Tensor = self.layers(x)
        return y * self.late if scale else y


def train(way: str, warms: bool, is_sharded: bool) -> tuple[list[Tensor], int]:
    """What the model looked like after each step, and how many graphs the steps have compiled."""
    torch._dynamo.reset()
    model: Any = seeded(Net)
    model = ddp_compile(model, **{"backend": "aot_eager", "bucket_cap_mb": 0.0005, **WAYS[way]})
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if is_sharded:
        optimizer = shard_optimizer(optimizer, model)
    if warms:
        model.warm_up(torch.zeros(5, WIDTH), timeout_s=60)
    num_graphs, seen = model._ddp_compile_state.num_graphs, []
    for step in range(3):
        loss_of(model(own_batch(step, WIDTH, 5))).backward()
        if warms and step:
            model.warm_up(torch.zeros(5, WIDTH))  # between backward and step too
        optimizer.step()
        optimizer.zero_grad()
        seen.append(torch.cat([flat_of(model), *(b.flatten().float() for b in model.buffers())]))
    return seen, model._ddp_compile_state.num_graphs - num_graphs


@pytest.mark.parametrize("way", only(["forward split", "static graph"], WAYS))
@pytest.mark.parametrize("is_sharded", only([False], [False, True]))
@on_ranks(2)
def test_nothing_changes(way: str, is_sharded: bool) -> None:
    expected, num_compiled = train(way, warms=False, is_sharded=is_sharded)
    found, num_left = train(way, warms=True, is_sharded=is_sharded)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    assert num_left == 0 < num_compiled


@on_ranks(2)
def test_unused_parameters_stay_unused() -> None:
    model: Any = ddp_compile(seeded(Net), find_unused_parameters=True, backend="eager")
    model.warm_up(torch.zeros(5, WIDTH), scale=True)
    assert all(p.grad is None for p in model.parameters())
    loss_of(model(own_batch(0, WIDTH, 5), scale=False)).backward()
    assert model.late.grad is None and model.layers[0].weight.grad is not None


@on_ranks(2, eagerly=True)
def test_a_rank_that_does_not_come() -> None:
    """The other one waits for it."""
    model = ddp_compile(nn.Linear(3, 3), backend="eager")
    if dist.get_rank() == 0:
        said = r"warm_up\(timeout_s=0.5\) did not end on every rank: done on rank 0, not done on rank 1"
        with pytest.raises(RanksDifferError, match=said):
            model.warm_up(torch.zeros(2, 3), timeout_s=0.5)


@on_ranks(2, eagerly=True)
def test_a_rank_that_raises() -> None:
    model, began = ddp_compile(nn.Linear(3, 3), backend="eager"), time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model.warm_up(torch.zeros(2, 4))
    else:
        with pytest.raises(RanksDifferError, match="raised RuntimeError on rank 0, done on rank 1"):
            model.warm_up(torch.zeros(2, 3))
    assert time.monotonic() - began < 60


@on_ranks(2, eagerly=True)
def test_refusals() -> None:
    model = ddp_compile(nn.Linear(3, 3), backend="eager")
    loss = loss_of(model(own_batch(0, 3)))
    with pytest.raises(ReplicationError, match="a forward with gradients, whose backward is still expected"):
        model.warm_up(torch.zeros(2, 3))
    loss.backward()
    model.warm_up(torch.zeros(2, 3))
    with torch.no_grad(), pytest.raises(ReplicationError, match="under no_grad; call it with gradients"):
        model.warm_up(torch.zeros(2, 3))

    class Detached(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    with pytest.raises(ReplicationError, match="no output with a gradient"):
        ddp_compile(Detached(3, 3), backend="eager").warm_up(torch.zeros(2, 3))


@on_ranks(2, eagerly=True)
def test_backward_without_a_forward_is_still_reduced() -> None:
    model = ddp_compile(nn.Linear(3, 3), backend="eager")
    model.warm_up(torch.zeros(2, 3))
    (model.weight.sum() * dist.get_rank() + model.bias.sum()).backward()
    assert (model.weight.grad == 0.5).all()


@on_ranks(2, eagerly=True)
def test_frozen_parameters_and_odd_buffers() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module.register_buffer("expanded", torch.ones(1).expand(3))
    with torch.inference_mode():
        module.register_buffer("inferred", torch.ones(3))
    model: Any = ddp_compile(
        module,
        backend="eager",
        broadcast_buffers=False,
        init_sync=False,
        find_unused_parameters=True,
        check_replicas=False,
    )
    model[0].requires_grad_(False)
    model.warm_up(torch.zeros(2, 3))
    loss_of(model(own_batch(0, 3))).backward()
