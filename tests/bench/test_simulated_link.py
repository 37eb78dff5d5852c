"""The simulated link: how long a transfer takes, and its results. When it is hidden: `test_measured_link`."""

import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulated_groups import FAST, PAYLOAD_BYTES, SLOW, SLOW_S, WORLD_SIZE, simulated_group
from torch import Tensor

from ddp_compile.bench.simulated_link import LinkModel, set_link_model
from ddp_compile.runtime.sharded.transfers import REDUCTION_TAG

pytestmark = pytest.mark.alone
SHARD = PAYLOAD_BYTES // 4 // WORLD_SIZE


def payload() -> Tensor:
    return torch.ones(PAYLOAD_BYTES // 4)


def shortest_s(function: Callable[[], Any]) -> float:
    """The call that other processes on the same cores disturbed least."""
    return min(timeit.repeat(function, number=1, repeat=5))


def test_one_rank_has_no_link() -> None:
    with pytest.raises(ValueError, match=r"world_size=1 must be .* at least 2"):
        LinkModel(world_size=1, alpha_s=0.0, bytes_per_second=1.0)


@pytest.mark.parametrize(
    ("send", "seconds"),
    [
        # A ring sends each byte twice, to all other ranks: 0.010 s and 2 * 3 / 4 * 4000 bytes at 200,000 a second.
        (dist.all_reduce, SLOW_S),
        (lambda t: dist.reduce_scatter_tensor(torch.empty(SHARD), t), 0.025),
        (lambda t: dist.all_gather_into_tensor(t, t[:SHARD]), 0.025),
        (lambda t: dist.all_gather_into_tensor(t, t[:SHARD], group=dist.new_group()), 0.025),
        (lambda t: [work.wait() for work in (dist.irecv(torch.empty_like(t), 1), dist.isend(t, 1))], 0.030),
        (lambda t: [work.wait() for work in [dist.all_reduce(t, async_op=True) for _ in range(2)]], 2 * SLOW_S),
    ],
)
def test_transfers_take_turns_and_the_modeled_time(send: Callable[[Tensor], Any], seconds: float) -> None:
    tensor = payload()
    with simulated_group(SLOW):
        assert 0.999 * seconds <= shortest_s(lambda: send(tensor)) < 1.2 * seconds


def test_rate_changes_but_not_world_size() -> None:
    tensor = payload()
    with simulated_group(SLOW):
        set_link_model(FAST)
        assert shortest_s(lambda: dist.all_reduce(tensor)) < SLOW_S / 4
        with pytest.raises(ValueError, match="world_size=8 must stay 4"):
            set_link_model(LinkModel.from_rate(1e9, world_size=8))


@pytest.mark.parametrize(("op", "expected"), [("SUM", 12.0), ("AVG", 3.0), ("MIN", 3.0), ("MAX", 3.0)])
def test_the_other_ranks_hold_the_same(op: str, expected: float) -> None:
    tensor = torch.full((5,), 3.0)
    with simulated_group(FAST):
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    assert torch.equal(tensor, torch.full((5,), expected))


def test_the_other_collectives_see_identical_ranks_and_take_no_time() -> None:
    tensor = torch.arange(3)
    gathered = [torch.empty_like(tensor) for _ in range(WORLD_SIZE)]
    objects: list[Any] = [None] * WORLD_SIZE
    sizes, text = torch.zeros(WORLD_SIZE, dtype=torch.int64), torch.zeros(3 * WORLD_SIZE, dtype=torch.uint8)

    def communicate() -> None:
        dist.broadcast(tensor, 2)
        dist.all_gather(gathered, tensor)
        dist.all_gather_object(objects, {"rank": "any"})
        dist.all_gather_into_tensor(sizes, torch.tensor([3]))  # as all_gather_object of torch 2.15 does
        dist.all_gather_into_tensor(text, torch.tensor([7, 8, 9], dtype=torch.uint8))
        dist.barrier()

    with simulated_group(SLOW):
        assert shortest_s(communicate) < SLOW_S / 4
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, WORLD_SIZE, "simulated")
    assert all(torch.equal(copy, torch.arange(3)) for copy in gathered)
    assert objects == [{"rank": "any"}] * WORLD_SIZE
    assert sizes.tolist() == [3] * WORLD_SIZE and text.tolist() == [7, 8, 9] * WORLD_SIZE


def test_shards_are_sums_and_what_would_come_from_others_is_left_alone() -> None:
    whole, shard = torch.arange(8.0), torch.empty(2)
    with simulated_group(FAST):
        dist.reduce_scatter_tensor(shard, whole)
        assert torch.equal(shard, WORLD_SIZE * torch.arange(2.0))
        whole[:2] = shard
        dist.all_gather_into_tensor(whole, whole[:2])
        dist.all_gather_into_tensor(gathered := torch.full((8,), float("nan")), shard)
        dist.all_to_all_single(parts := torch.full((8,), float("nan")), torch.arange(8.0))
        dist.recv(whole, 3)
        dist.recv(added_up := torch.full((2,), float("nan")), 3, tag=REDUCTION_TAG)
    assert torch.equal(added_up, torch.zeros(2)) and torch.equal(parts, torch.arange(2.0).repeat(WORLD_SIZE))
    assert torch.equal(gathered, shard.repeat(WORLD_SIZE))
    assert torch.equal(whole, torch.cat([WORLD_SIZE * torch.arange(2.0), torch.arange(2.0, 8.0)]))


def test_a_transfer_that_fails_raises_where_it_is_waited_for() -> None:
    with simulated_group(FAST):
        work = dist.all_reduce(torch.ones(1).expand(4), async_op=True)
        with pytest.raises(RuntimeError, match="single memory location"):
            work.wait()
        dist.all_reduce(payload())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: dist.reduce(t, 0), NotImplementedError, "reduce is not simulated"),
        (lambda t: dist.new_group([0, 1]), NotImplementedError, "new_group of 2 ranks is not simulated"),
        (lambda t: dist.all_reduce(t, op=dist.ReduceOp.PRODUCT), NotImplementedError, "PRODUCT is not simulated"),
        (lambda t: dist.all_reduce(t.to_sparse()), NotImplementedError, "sparse_coo tensor is not simulated"),
        (lambda t: dist.all_reduce(t.to("meta")), ValueError, "device=cpu of the simulated link .* meta"),
    ],
)
def test_what_is_not_simulated_says_so(call: Callable[[Tensor], Any], error: type[Exception], message: str) -> None:
    with simulated_group(FAST), pytest.raises(error, match=message):
        call(payload())
