"""Shards that travel by reduce-scatter and all-gather, as on NCCL: here over gloo, taken for another backend."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from beside import own_batch, seeded
from rank_pool import on_ranks
from torch import Tensor, nn

from ddp_compile import ddp_compile, shard_optimizer, torch_internals
from ddp_compile.runtime.comm.transfers import Transfer
from ddp_compile.runtime.sharded.cut import Cut
from ddp_compile.runtime.sharded.transfers import ShardTransfers

NUM_STEPS = 4


def train(collectives: bool, same_batches: bool) -> tuple[list[Tensor], list[list[bool]]]:
    """Parameters; and for each step, for each reduce-scatter of a padded bucket, whether it read it where it lies."""
    torch.manual_seed(0)
    layers = [nn.Linear(*pair) for pair in itertools.pairwise((7, 31, 29, 17, 1))]
    model = ddp_compile(nn.Sequential(*layers), bucket_cap_mb=0.001, backend="eager")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    launched: list[Tensor] = []
    in_place: list[list[bool]] = []
    launch, reduce_scatter = ShardTransfers.reduce_scatter, torch_internals.reduce_scatter_single

    def recorded_launch(self: ShardTransfers, flat: Tensor, cut: Cut) -> Transfer:
        launched.append(flat)
        return launch(self, flat, cut)

    def recorded(shard: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
        assert shard.nbytes % 16 == 0
        if whole.numel() > launched[-1].numel():
            in_place[-1].append(whole.data_ptr() == launched[-1].data_ptr())
        work: dist.Work = reduce_scatter(shard, whole, group)
        return work

    with (
        patch.object(ShardTransfers, "reduce_scatter", recorded_launch),
        patch.object(torch_internals, "reduce_scatter_single", recorded),
    ):
        with patch.object(torch_internals, "backend_name", lambda *_: "another") if collectives else nullcontext():
            optimizer = shard_optimizer(optimizer, model)
        for step in range(NUM_STEPS):
            in_place.append([])
            optimizer.zero_grad()
            x = seeded(lambda: torch.randn(4, 7), 10 * step) if same_batches else own_batch(step, 7)
            model(x).square().mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()], in_place


@pytest.mark.parametrize("same_batches", [True, False])
@on_ranks(3)
def test_no_step_copies_a_bucket(same_batches: bool) -> None:
    """Three ranks do not divide most buckets. With equal batches, the order of a sum does not change its bits."""
    (ours, (first, *others)), (theirs, _) = train(True, same_batches), train(False, same_batches)
    assert first and not any(first)  # the first backward finds out which buckets there are
    assert all(of_step and all(of_step) for of_step in others)
    difference = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    assert difference <= (0.0 if same_batches else 1e-5)
