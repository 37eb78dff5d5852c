"""A step of a sharded optimizer that is interrupted: everything that goes on from there is an error by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import Mlp, loss_of
from rank_pool import RankPool
from test_sharded_optimizer import CAP_MB, WIDTH, batch
from test_sharded_parameters import make
from test_sharded_refusals import said_by

from ddp_compile import ddp_compile, shard_optimizer, sharded_optimizer_state_dict

Ranks = Callable[[int], RankPool]


@torch.compiler.set_stance("force_eager")
def half_a_step(way: str) -> list[str]:
    """An interrupt comes before the first or the second bucket is gathered."""
    model, optimizer = make()
    loss_of(model(batch(0))).backward()
    count = iter(range(8))

    def interrupted(gather: Callable[[Any], None], stepped: Any) -> None:
        if next(count) == 1 or way == "first":
            raise KeyboardInterrupt
        gather(stepped)

    for bucket in model.comm_algorithm.buckets:
        bucket.gather = partial(interrupted, bucket.gather)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    return [
        *map(said_by, (model.state_dict, lambda: model.layers[0].weight.sum(), optimizer.step)),
        said_by(lambda: model(batch(1))),
        said_by(model.unwrap),
        said_by(lambda: [float(p.sum()) for p in model.parameters()]),
        said_by(optimizer.step),
    ]


def test_half_a_step_is_an_error_of_whoever_goes_on(ranks: Ranks) -> None:
    for way in ("first", "second"):
        for said in ranks(2).run(half_a_step, way):
            for text in said[:-1]:
                assert "has raised before all parameters were stepped, so the ranks are not alike" in text
            assert "make a new optimizer, and load a checkpoint" in said[-1]


@torch.compiler.set_stance("force_eager")
def after_half_a_step(left: int) -> list[Any]:
    torch.manual_seed(1)
    model: Any = ddp_compile(Mlp(WIDTH, 3), bucket_cap_mb=CAP_MB, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    shard_optimizer(optimizer, model)
    module: Any = importlib.import_module("torch.optim.sgd")
    calls, step_of = [], module.sgd

    def fails(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) > left:
            raise KeyboardInterrupt
        step_of(*args, **kwargs)

    loss_of(model(batch(0))).backward()
    num_pieces = len(optimizer.param_groups[0]["params"])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "sgd", fails)
        optimizer.step()
    said = [
        said_by(optimizer.state_dict),
        said_by(lambda: optimizer.load_state_dict({})),
        said_by(lambda: sharded_optimizer_state_dict(optimizer)),
        said_by(optimizer.step),
    ]
    piece = optimizer.param_groups[0]["params"][0]
    said.append(said_by(lambda: piece.grad.isfinite()))
    return [*said, len(optimizer.param_groups[0]["params"]) == num_pieces]


def test_states_after_half_a_step_are_refused_by_name(ranks: Ranks) -> None:
    for left in (0, 1, 2):  # in the first bucket, between, and in the last, which is outside of our hooks
        for rank, (*said, gradients, has_all_pieces) in enumerate(ranks(2).run(after_half_a_step, left)):
            assert all(f"rank {rank}: SGD.step() has raised before all parameters" in text for text in said)
            assert "isfinite of gradients that are reduced to shards" in gradients and has_all_pieces
