"""Ranks that train on the device of their number, and have not made it the current one: device 0 is, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from device_ranks import DeviceRanks
from torch import nn

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.algorithms import GradientAllReduce, LocalSGD


@pytest.fixture(scope="module")
def device_ranks() -> Iterator[DeviceRanks]:
    ranks = DeviceRanks(has_stream_interface=True)
    yield ranks
    ranks.close()


def train(model: Any, optimizer: Any, device: torch.device) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 8).to(device)).square().mean().backward()
        optimizer.step()


def use_objects(device: torch.device) -> None:
    """Everything that sends objects, or waits at a barrier, over a group without a backend for CPUs."""
    group = dist.new_group(backend="accl")

    def replicate(**settings: Any) -> tuple[Any, torch.optim.Optimizer]:
        model = ddp_compile(nn.Linear(8, 8).to(device), backend="eager", process_group=group, **settings)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = replicate(algorithm=GradientAllReduce(hierarchical=True))
    train(model, optimizer, device)
    model, optimizer = replicate()
    sharded = shard_optimizer(optimizer, model)
    train(model, sharded, device)
    sharded.state_dict()
    model.unwrap()
    model, optimizer = replicate(algorithm=LocalSGD(period=3))
    train(model, optimizer, device)
    model.set_comm_algorithm(GradientAllReduce(), optimizers=[optimizer])


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
                tensor = args[1] if name == "all_gather" else args[0]
                messages.append(str(tensor.device))
            return send(*args, **kwargs)

        return call

    torch.accelerator.set_device_index(0)
    with ExitStack() as stack:
        for name in ("all_gather", "broadcast"):  # as the functions for objects call them
            stack.enter_context(patch.object(c10d, name, recorded(name, getattr(c10d, name))))
        stack.enter_context(patch.object(dist, "barrier", recorded("barrier", dist.barrier)))
        stack.enter_context(patch.dict("os.environ", {"LOCAL_RANK": str(rank)}))
        use_objects(torch.device("acc", rank))
    assert torch.accelerator.current_device_index() == 0
    return set(messages), len(messages), barriers


def test_objects_and_barriers_go_to_the_parameters_device(device_ranks: DeviceRanks) -> None:
    """On NCCL two ranks that use device 0 both are an error, and each takes memory there."""
    for rank, (devices, number, barriers) in enumerate(device_ranks.run(devices_of_objects)):
        assert number >= 6
        assert devices == barriers == {f"acc:{rank}"}
