"""What the ranks tell each other behind the buckets: one message in a round at most, and none where nothing is new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, loss_of
from rank_pool import RankPool

from ddp_compile import ddp_compile
from ddp_compile.runtime import round_message
from ddp_compile.runtime.round_message import RoundMessage

Ranks = Callable[[int], RankPool]
NUM_STEPS = 6


def messages_in_each_step(settings: dict[str, Any]) -> list[int]:
    """How many collectives beside those of the buckets each backward has started."""
    started = 0
    all_reduce = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal started
        started += 1
        return all_reduce(*args, **kwargs)

    model = ddp_compile(Mlp(width=33, num_layers=4), bucket_cap_mb=0.003, backend="aot_eager", **settings)
    numbers = []
    for _ in range(NUM_STEPS):
        loss = loss_of(model(torch.randn(2, 33)))
        started = 0
        dist.all_reduce = counting
        try:
            loss.backward()
        finally:
            dist.all_reduce = all_reduce
        numbers.append(started)
    return numbers


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        ({"split": "forward"}, [0] * NUM_STEPS),
        ({"split": "backward"}, [1] * NUM_STEPS),
        ({"split": "forward", "find_unused_parameters": True}, [1] * NUM_STEPS),
        ({"split": "backward", "find_unused_parameters": True}, [1] * NUM_STEPS),
        ({"split": "forward", "static_graph": True}, [1] + [0] * (NUM_STEPS - 1)),
        ({"split": "backward", "static_graph": True}, [1] * NUM_STEPS),
    ],
)
def test_there_is_one_message_in_a_round_whatever_is_on(
    settings: dict[str, Any], messages: list[int], ranks: Ranks
) -> None:
    assert ranks(2).run(messages_in_each_step, settings) == [messages, messages]


def tell(lengths: list[int]) -> list[list[int]]:
    message = RoundMessage(dist.group.WORLD, torch.device("cpu"), is_needed=True)
    parts = [bytearray(length) for length in lengths]
    for part in parts:
        part[dist.get_rank()] = 1
    message.send(parts)
    return [list(part) for part in message.wait()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_flags_of_all_ranks_are_heard(world_size: int, ranks: Ranks) -> None:
    for heard in ranks(world_size).run(tell, [3, 5]):
        told = [int(rank < world_size) for rank in range(5)]
        assert heard == [told[:3], told]


def group_for_a_gpu(with_store: bool) -> tuple[str, str, list[int], bool]:
    """What is made for gradients on a CUDA device, which need not be there for that."""
    first_two = dist.new_group([0, 1])
    if dist.get_rank() == 2:  # which knows nothing of it
        return "", "", [], True
    group = first_two if with_store else WithoutStore(first_two)
    found, device = round_message._group_for_the_host(group, torch.device("cuda", 0))
    if found is group:
        return "the same", str(device), [], True
    answer = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(answer, group=found)
    ranks = dist.get_process_group_ranks(found)
    return dist.get_backend(found), str(device), ranks, answer.item() == 3


class WithoutStore:
    """A process group that is written in Python."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def get_group_store(self) -> None:
        return None


def test_beside_gradients_on_a_gpu_the_hosts_have_a_group_of_their_own(ranks: Ranks) -> None:
    found = ranks(3).run(group_for_a_gpu, True)
    assert found[:2] == [("gloo", "cpu", [0, 1], True)] * 2


def test_a_process_group_without_a_store_carries_the_message_itself(ranks: Ranks) -> None:
    assert ranks(3).run(group_for_a_gpu, False)[:2] == [("the same", "cuda:0", [], True)] * 2
