"""``require_manual_backward_finalization``: code after a backward runs before its last reductions are waited for."""

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from beside import one_backward, pair, train_beside
from models import Mlp, largest, loss_of
from rank_pool import on_ranks
from torch import nn
from ways_to_train import train

from ddp_compile import ddp_compile
from ddp_compile.runtime.algorithms import comm_hook


def mlp() -> nn.Module:
    return Mlp(width=33, num_layers=4)


@pytest.mark.parametrize("way", ["two_forwards", "contributor_that_appears_on_one_rank", "accumulate_in_no_sync"])
@on_ranks(2)
def test_gradients_by_hand(way: str, split: str) -> None:
    assert train(way, by_hand=True, split=split).worst < 1e-6


@on_ranks(2)
def test_backward_does_not_wait(split: str) -> None:
    """The last rank begins its backward after those of the others have returned."""
    model = ddp_compile(mlp(), split=split, find_unused_parameters=True, bucket_cap_mb=0.003, backend="aot_eager")
    model.require_manual_backward_finalization = True
    store = dist.distributed_c10d._get_default_store()
    x = torch.randn(6, 33)
    for step in range(3):
        model.zero_grad()
        loss = loss_of(model(x))
        key = f"manual/{split}/{step}"
        if step and dist.get_rank() == dist.get_world_size() - 1:
            store.wait([key])
        loss.backward()
        store.set(key, "returned")
        model.finalize_backward()


@on_ranks(2, eagerly=True)
def test_failed_finalization() -> None:
    """The comm hook's future fails when it is waited for."""

    def fails_later(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_exception(ValueError("no such peer"))
        return future

    model: Any = ddp_compile(mlp(), backend="eager")
    model.require_manual_backward_finalization = True
    # Otherwise the backward waits for it.
    with patch.object(comm_hook, "_hooks_of_torch_that_start", lambda: {fails_later}):
        model.register_comm_hook(None, fails_later)
    x = torch.randn(6, 33)
    loss_of(model(x)).backward()
    with pytest.raises(RuntimeError, match="no such peer"):
        model.finalize_backward()
    with pytest.raises(RuntimeError, match="the last backward, or its finalization, has raised"):
        model.finalize_backward()
    with pytest.raises(RuntimeError, match="the last backward raised after its reduction had started"):
        model(x)


@on_ranks(2)
def test_gradient_before_finalization(split: str) -> None:
    """Also if buckets are launched inside the backward."""
    model: Any = ddp_compile(mlp(), split=split, bucket_cap_mb=0.003, backend="aot_eager")
    model.require_manual_backward_finalization = True
    x = torch.randn(6, 33)
    for _ in range(2):
        loss_of(model(x)).backward()
        model.finalize_backward()
    loss_of(model(x)).backward()
    said = rf"rank {dist.get_rank()}: a gradient of layers\.1\.weight before finalize_backward\(\)"
    with pytest.raises(RuntimeError, match=said):
        model.layers[1].weight.square().sum().backward()
    with pytest.raises(RuntimeError, match="the last backward, or its finalization, has raised"):
        model.finalize_backward()


@on_ranks(2, eagerly=True)
def test_collective_after_backward() -> None:
    """The hook starts a second collective when its first one is over; another one is sent after the backward."""
    started = []

    def two_collectives(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        def second(future: Any) -> torch.Tensor:
            time.sleep(0.1 * dist.get_rank())
            started.append(bucket.index())
            dist.all_reduce(torch.ones(3))
            return bucket.buffer().div_(dist.get_world_size())

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(second)

    model: Any = ddp_compile(mlp(), bucket_cap_mb=0.003, backend="eager")
    model.require_manual_backward_finalization = True
    model.register_comm_hook(None, two_collectives)
    loss_of(model(torch.randn(6, 33))).backward()
    num_started, total = len(started), torch.ones(1)
    dist.all_reduce(total)
    model.finalize_backward()
    num_buckets, total = len(model.bucket_plan.buckets), total.item()
    assert num_started == num_buckets
    assert total == 2


@on_ranks(2, eagerly=True)
def test_forgotten_inside_join() -> None:
    """By a rank that trains longer, to the other one, who has no input left."""
    model: Any = ddp_compile(mlp(), backend="eager")
    model.require_manual_backward_finalization = True
    with model.join():
        for step in range(2 + 2 * dist.get_rank()):
            loss_of(model(torch.randn(6, 33))).backward()
            if step == 2:
                with pytest.raises(RuntimeError, match="a forward before finalize_backward"):
                    model(torch.randn(6, 33))
            model.finalize_backward()


@pytest.mark.parametrize("by_hand", [False, True])
@on_ranks(2)
def test_compiled_step(by_hand: bool) -> None:
    """Including the backward: Dynamo sees the frames of our hooks."""
    models = pair(mlp, bucket_cap_mb=0.003)
    models[0].require_manual_backward_finalization = by_hand

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> None:
        models[0].zero_grad()
        loss_of(models[0](x)).backward()
        if by_hand:
            models[0].finalize_backward()

    def step_of(model: Any, x: torch.Tensor, step: int) -> None:
        compiled(x) if model is models[0] else one_backward(model, x)

    assert largest(train_beside(models, step_of, 4, width=33, rows=6)) < 1e-6
    assert len(models[0].explain().graphs) == 1
