"""The message after the buckets, at most one in an iteration and none if nothing is new; our own process groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Mlp, loss_of
from rank_pool import on_ranks

from ddp_compile import ddp_compile
from ddp_compile.runtime.comm import process_groups, streams
from ddp_compile.runtime.comm.iteration_message import IterationMessage
from ddp_compile.runtime.comm.process_groups import group_of, own_group

NUM_STEPS = 6


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        ({"split": "forward"}, [0] * NUM_STEPS),
        ({"split": "backward", "find_unused_parameters": True}, [1] * NUM_STEPS),
        ({"split": "forward", "static_graph": True}, [1] + [0] * (NUM_STEPS - 1)),
    ],
)
@on_ranks(2)
def test_one_message_in_an_iteration(settings: dict[str, Any], messages: list[int]) -> None:
    model = ddp_compile(Mlp(width=33, num_layers=4), bucket_cap_mb=0.003, backend="aot_eager", **settings)
    numbers = []
    for _ in range(NUM_STEPS):
        loss = loss_of(model(torch.randn(2, 33)))
        with mock.patch.object(IterationMessage, "send", autospec=True, side_effect=IterationMessage.send) as send:
            loss.backward()
        numbers.append(send.call_count)
    assert numbers == messages


@contextmanager
def without_a_gpu() -> Iterator[None]:
    """As if there were one; the name of a group of hosts is agreed on with tensors on the gradients' device."""
    agree = process_groups.name_from_rank_0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(streams.backend, "has_streams", lambda device: device.type == "cuda")
        patched.setattr(process_groups, "name_from_rank_0", lambda group, _: agree(group, torch.device("cpu")))
        yield


#: Of the gradients; it need not exist for these tests.
GPU = torch.device("cuda", 0)


@on_ranks(3)
def test_group_of_hosts() -> None:
    dist.new_group([0])  # which rank 0 alone knows, as the groups of pipelines and tensor parallelism
    first_two = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return
    dist.barrier(first_two)  # a rank that is done must not close connections that the other is still making
    with without_a_gpu():
        message = IterationMessage(first_two, GPU, is_needed=True)
    assert message._group is not first_two and str(message._device) == "cpu"
    message.send([bytearray([dist.get_rank() == 0, dist.get_rank() == 1, 0])])
    assert message.wait() == [bytes([1, 1, 0])]


def test_process_group_without_store() -> None:
    written_in_python: Any = SimpleNamespace(size=lambda: 2, get_group_store=lambda: None)
    with without_a_gpu():
        assert IterationMessage(written_in_python, GPU, is_needed=True)._device == GPU


def test_groups_of_a_bound_default_group(single_rank_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound by ``init_process_group(device_id=...)``: gloo takes any device, and hands it on as NCCL does."""
    asked: list[dist.ProcessGroup] = []  # groups whose communicators would have been split
    monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", lambda group, *_: asked.append(group))
    default: Any = dist.group.WORLD
    default.bound_device_id = GPU
    cpu = torch.device("cpu")
    groups = group_of([0], default, cpu, "agreed_on"), own_group(default, cpu)
    with pytest.raises(ValueError, match="world size"):
        group_of([0, -1], default, cpu, "agreed_on")
    assert [group.bound_device_id for group in groups] == [None, None] and asked == []
    assert default.bound_device_id == GPU
