"""Shards that travel by reduce-scatter and all-gather, as on NCCL: here over gloo, which has them too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rank_pool import Ranks
from torch import Tensor, nn

from ddp_compile import ddp_compile, shard_optimizer, torch_internals
from ddp_compile.runtime.comm.transfers import Transfer
from ddp_compile.runtime.sharded.cut import Cut
from ddp_compile.runtime.sharded.transfers import ShardTransfers

NUM_STEPS = 4


@contextmanager
def as_on_nccl() -> Iterator[None]:
    """A sharded optimizer that is attached inside takes its group for one of another backend than gloo."""
    with patch.object(torch_internals, "backend_name", lambda *_: "another"):
        yield


def make() -> nn.Module:
    torch.manual_seed(0)
    widths = (7, 31, 29, 17, 1)
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))


class Trained(NamedTuple):
    """Parameters; and for each step, for each reduce-scatter of a padded bucket, whether it read it where it lies."""

    parameters: list[Tensor]
    in_place: list[list[bool]]


def train(collectives: bool, same_batches: bool) -> Trained:
    model = ddp_compile(make(), bucket_cap_mb=0.001, backend="eager")
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
        with as_on_nccl() if collectives else nullcontext():
            optimizer = shard_optimizer(optimizer, model)
        for step in range(NUM_STEPS):
            in_place.append([])
            rank = 0 if same_batches else dist.get_rank()
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return Trained([parameter.detach().clone() for parameter in model.parameters()], in_place)


def both(same_batches: bool) -> tuple[float, list[list[bool]]]:
    ours, theirs = train(True, same_batches), train(False, same_batches)
    pairs = zip(ours.parameters, theirs.parameters, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs), ours.in_place


@pytest.mark.parametrize("same_batches", [True, False])
def test_no_step_copies_a_bucket(same_batches: bool, ranks: Ranks) -> None:
    """Three ranks do not divide most buckets. With equal batches, the order of a sum does not change its bits."""
    for difference, (first, *others) in ranks(3).run(both, same_batches):
        assert first and not any(first)  # the first backward finds out which buckets there are
        for of_step in others:
            assert of_step and all(of_step)
        assert difference <= (0.0 if same_batches else 1e-5)
