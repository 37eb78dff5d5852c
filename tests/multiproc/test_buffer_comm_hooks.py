"""What a user's hook makes of the buffers, in place of the broadcast: as with DistributedDataParallel."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import loss_of, needs_ddp_to_keep_buffers, relative_difference
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

from ddp_compile import ddp_compile

Ranks = Callable[[int], RankPool]
WIDTH = 8


def average(state: dict[str, Any], buffers: Mapping[str, Tensor]) -> list[torch.futures.Future[Any]] | None:
    """The mean of the running statistics; where the forward does not read them, it is under way in the backward."""
    state["calls"] += 1
    state["names"] = sorted(name.removeprefix("module.") for name in buffers)
    futures = []
    for buffer in buffers.values():
        if buffer.is_floating_point():
            buffer /= dist.get_world_size()
            futures.append(dist.all_reduce(buffer, async_op=True).get_future())
    if state.get("waits"):
        torch.futures.wait_all(futures)
        return None
    return futures


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("location", ["PRE_FORWARD", pytest.param("POST_FORWARD", marks=needs_ddp_to_keep_buffers)])
@on_ranks(2)
def test_buffers_are_those_of_ddp_with_the_same_hook(location: str, split: str) -> None:
    model: Any = ddp_compile(make(), bucket_cap_mb=1e-4, backend="aot_eager", split=split)
    reference = DistributedDataParallel(make())
    states: list[dict[str, Any]] = [{"calls": 0, "waits": location == "PRE_FORWARD"} for _ in range(2)]
    for each, state in zip((model, reference), states, strict=True):
        each._register_buffer_comm_hook(state, average, Location[location])
    worst = 0.0
    for step in range(5):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for each in (model, reference):
            each.zero_grad()
            loss_of(each(x)).backward()
        ours, theirs = dict(model.named_buffers()), dict(reference.module.named_buffers())
        worst = max([worst, *(relative_difference(ours[name].float(), theirs[name].float()) for name in theirs)])
        grads = zip(model.parameters(), reference.parameters(), strict=True)
        worst = max([worst, *(relative_difference(p.grad, q.grad) for p, q in grads)])
        with torch.no_grad():
            copy.deepcopy(reference.module).eval()(x)
            model.eval()(x)  # calls no hook, so that a rank may evaluate on its own
            model.train()
    (ours, theirs) = states
    assert worst < 1e-6
    assert ours == theirs and ours["calls"] == 5
    assert ours["names"] == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]


@on_ranks(2)
def test_a_hook_is_called_when_a_backward_is_reduced_and_where_there_are_buffers() -> None:
    counts = []
    for ignore in ([], ["1.running_mean", "1.running_var", "1.num_batches_tracked"]):
        model: Any = ddp_compile(make(), backend="eager", parameters_to_ignore=ignore)
        state = {"calls": 0}
        model._register_buffer_comm_hook(state, average, "POST_FORWARD")
        with model.no_sync():
            loss_of(model(torch.randn(6, WIDTH))).backward()
        counts.append(state["calls"])
        with model.join():
            for _ in range(2 + dist.get_rank()):
                loss_of(model(torch.randn(6, WIDTH))).backward()
        counts.append(state["calls"])
    assert counts == [0, 3, 0, 0]


@on_ranks(2)
def test_futures_of_forwards_without_backward_do_not_pile_up() -> None:
    futures: list[weakref.ReferenceType[Any]] = []

    def noted(state: dict[str, Any], buffers: Mapping[str, Tensor]) -> list[torch.futures.Future[Any]]:
        given = average(state, buffers) or []
        futures.extend(map(weakref.ref, given))
        return given

    model: Any = ddp_compile(make(), backend="eager")
    model._register_buffer_comm_hook({"calls": 0}, noted, "POST_FORWARD")
    for _ in range(20):
        model(torch.randn(6, WIDTH))
        dist.barrier()
    assert sum(future() is not None for future in futures) <= 4


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((None, "average"), TypeError, "the buffer comm hook 'average' is not callable"),
        ((None, average, "LATER"), ValueError, "comm_hook_location='LATER' must be PRE_FORWARD or POST_FORWARD"),
    ],
)
def test_what_is_no_hook_is_refused(
    arguments: tuple[Any, ...], error: type[Exception], says: str, single_rank_group: None
) -> None:
    model: Any = ddp_compile(make(), backend="eager")
    with pytest.raises(error) as refused:
        model._register_buffer_comm_hook(*arguments)
    assert says in str(refused.value)
