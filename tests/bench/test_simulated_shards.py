"""The simulated link: shards, and messages from rank to rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_simulated_link import FAST, PAYLOAD_BYTES, SLOW, SLOW_S, WORLD_SIZE, payload, shortest_s, simulated_group
from torch import Tensor

from ddp_compile.runtime.sharded.transfers import REDUCTION_TAG

pytestmark = pytest.mark.alone
SHARD = PAYLOAD_BYTES // 4 // WORLD_SIZE


@pytest.mark.parametrize(
    "send",
    [
        lambda t: dist.reduce_scatter_tensor(torch.empty(SHARD), t),
        lambda t: dist.all_gather_into_tensor(t, t[:SHARD]),
        lambda t: dist.all_to_all_single(torch.empty_like(t), t),
        lambda t: dist.all_gather_into_tensor(t, t[:SHARD], group=dist.new_group()),
    ],
)
def test_what_moves_shards_takes_half_of_an_all_reduce(send: Callable[[Tensor], Any]) -> None:
    tensor, half_s = payload(), SLOW.shards_s(PAYLOAD_BYTES)
    assert half_s == pytest.approx(SLOW.alpha_s + (SLOW_S - SLOW.alpha_s) / 2)
    with simulated_group(SLOW):
        assert half_s <= shortest_s(lambda: send(tensor)) < 1.2 * half_s


def test_messages_take_the_link_and_come_in_beside() -> None:
    tensor, message_s = payload(), SLOW.message_s(PAYLOAD_BYTES)
    assert message_s == pytest.approx(0.010 + 0.020)

    def exchange() -> None:
        works = [dist.irecv(torch.empty_like(tensor), 1), dist.isend(tensor, 1)]
        for work in works:
            assert work is not None
            work.wait()

    with simulated_group(SLOW):
        assert message_s <= shortest_s(exchange) < 1.1 * message_s
        assert message_s <= shortest_s(lambda: dist.send(tensor, 1)) < 1.1 * message_s


def test_shards_are_sums_and_what_would_come_from_others_is_left_alone() -> None:
    whole, shard = torch.arange(8.0), torch.empty(2)
    with simulated_group(FAST):
        dist.reduce_scatter_tensor(shard, whole)
        assert torch.equal(shard, WORLD_SIZE * torch.arange(2.0))
        dist.all_gather_into_tensor(whole, shard)
        dist.all_to_all_single(whole, whole.clone())
        dist.recv(whole, 3)
        dist.recv(added_up := torch.full((2,), float("nan")), 3, tag=REDUCTION_TAG)
    assert torch.equal(added_up, torch.zeros(2))
    assert torch.equal(whole, torch.cat([WORLD_SIZE * torch.arange(2.0), torch.arange(2.0, 8.0)]))
