"""Training on the pretend accelerator, beside CPU ranks or DistributedDataParallel on the CPU."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from device_places import PLACEMENTS, placed
from device_programs import PROGRAMS, perform
from device_ranks import DeviceRanks, needs_pinned_torch
from in_ci import only
from torch import nn
from ways_to_train import NUM_STEPS, WAYS, Trained, train

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.algorithms import GradientAllReduce

pytestmark = needs_pinned_torch

# The most demanding placement. "default stream" is what most people have.
HARDEST = "side stream, device not set"
#: The device has no sparse tensors.
WAYS_OF_THE_DEVICE = [name for name in WAYS if name != "sparse_regulariser"]


@pytest.fixture(scope="module")
def device_ranks() -> Iterator[DeviceRanks]:
    with closing(DeviceRanks()) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("name", "placement"),
    only(
        [("backward split", "default stream"), ("normalized", HARDEST), ("sharded, read on another stream", HARDEST)],
        ((name, placement) for placement in PLACEMENTS for name in PROGRAMS),
    ),
)
def test_parameters_are_as_expected(device_ranks: DeviceRanks, name: str, placement: str) -> None:
    for difference in device_ranks.run(perform, name, placement):
        assert difference <= PROGRAMS[name].tolerance


def train_in_way(name: str, placement: str, split: str) -> Trained:
    with placed(PLACEMENTS[placement]) as where:
        return train(name, device=str(where.device), split=split)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS_OF_THE_DEVICE)
@pytest.mark.parametrize(
    ("placement", "split"), [("default stream", "backward"), (HARDEST, "backward"), (HARDEST, "forward")]
)
def test_gradients_are_exact_and_buckets_are_launched_early(
    device_ranks: DeviceRanks, way: str, placement: str, split: str
) -> None:
    if (way, split) == ("losses_one_by_one", "forward"):
        pytest.skip("a graph that is cut takes it for a gradient that arrives twice")
    for trained in device_ranks.run(train_in_way, way, placement, split):
        assert trained.worst <= WAYS[way].tolerance
        if split == "backward":
            assert trained.num_early[-1] == WAYS[way].num_early
        else:
            assert trained.num_early == (0,) * NUM_STEPS


# Ranks that train elsewhere than one may think: not on the current device.


def use_objects(device: torch.device) -> None:
    """Everything that sends objects, or waits at a barrier, over a group without a backend for CPUs."""
    group = dist.new_group(backend="accl")
    for is_sharded, settings in ((False, {"algorithm": GradientAllReduce(hierarchical=True)}), (True, {})):
        model: Any = ddp_compile(nn.Linear(8, 8).to(device), backend="eager", process_group=group, **settings)
        optimizer: Any = torch.optim.AdamW(model.parameters())
        optimizer = shard_optimizer(optimizer, model) if is_sharded else optimizer
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(3, 8).to(device)).square().mean().backward()
            optimizer.step()
        if is_sharded:
            optimizer.state_dict()
            model.unwrap()


def devices_of_objects() -> tuple[set[str], int, set[str]]:
    """Devices of the messages that carry objects, their number, and the current devices at barriers."""
    c10d, rank = dist.distributed_c10d, dist.get_rank()
    messages: list[str] = []
    barriers: set[str] = set()

    def recorded(name: str, send: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "barrier":
                barriers.add(f"acc:{torch.accelerator.current_device_index()}")
            else:
                messages.append(str(args[1].device))
            return send(*args, **kwargs)

        return call

    torch.accelerator.set_device_index(0)
    with ExitStack() as stack:
        # As the functions for objects call it.
        stack.enter_context(patch.object(c10d, "all_gather", recorded("all_gather", c10d.all_gather)))
        stack.enter_context(patch.object(dist, "barrier", recorded("barrier", dist.barrier)))
        stack.enter_context(patch.dict("os.environ", {"LOCAL_RANK": str(rank)}))
        use_objects(torch.device("acc", rank))
    assert torch.accelerator.current_device_index() == 0
    return set(messages), len(messages), barriers


@pytest.mark.long
def test_objects_and_barriers_go_to_the_parameters_device(device_ranks: DeviceRanks) -> None:
    """On NCCL two ranks that use device 0 both are an error, and each takes memory there."""
    for rank, (devices, number, barriers) in enumerate(device_ranks.run(devices_of_objects)):
        assert number >= 6
        assert devices == barriers == {f"acc:{rank}"}
