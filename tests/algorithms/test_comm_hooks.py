"""Comm hooks, torch's own and others, of gradients and of buffers, against eager DDP with the same hook."""

import copy
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import beside_plain, difference, one_backward, own_batch, pair, train_beside
from models import Mlp, assert_buckets_launched_early, largest, loss_of, needs_ddp_to_keep_buffers, relative_difference
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

from ddp_compile import RanksDifferError, ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

Hook = Callable[..., Any]

WIDTH, NUM_LAYERS, CAP_MB, NUM_STEPS = 33, 4, 0.004, 5


def power_sgd() -> tuple[Any, Hook]:
    """Compresses from the third step on, so that error feedback and warm start act in the fourth."""
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook


def post_local_sgd() -> tuple[Any, Hook]:
    """From the third step on, the ranks differ."""
    alone, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    return state, post_localSGD_hook.post_localSGD_hook


def other_tensor(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The result is in other memory and has another dtype."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().double() * 3)
    return future


# Each makes a new state and says what hook it is for.
HOOKS: dict[str, Callable[[], tuple[Any, Hook]]] = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "power": power_sgd,
    "post local": post_local_sgd,
    "other tensor": lambda: (None, other_tensor),
    "builtin allreduce": lambda: (None, dist.BuiltinCommHookType.ALLREDUCE),
    "builtin fp16": lambda: (None, dist.BuiltinCommHookType.FP16_COMPRESS),
}


def waiting(hook: Hook) -> Hook:
    """For DistributedDataParallel, which hangs on gloo if callbacks of two buckets start collectives."""

    def wait(state, bucket):
        future = hook(state, bucket)
        future.wait()
        return future

    return wait


def two_models(**settings: Any) -> tuple[Any, Any]:
    return pair(lambda: Mlp(WIDTH, NUM_LAYERS), {"bucket_cap_mb": CAP_MB, "gradient_as_bucket_view": True, **settings})


def train(models: tuple[Any, Any], num_steps: int = NUM_STEPS) -> float:
    return largest(train_beside(models, num_steps=num_steps, width=WIDTH, lr=0.1))


#: Number of ranks; our hook and DistributedDataParallel's; settings; and how far gradients may be apart.
CASES: list[tuple[int, str, str, dict[str, bool], float]] = [
    *((2, name, name, {}, 0.0) for name in ("power", "other tensor", "post local")),
    (2, "other tensor", "other tensor", {"gradient_as_bucket_view": False}, 0.0),  # results are copied back
    (3, "builtin allreduce", "allreduce", {}, 1e-6),
    (2, "builtin fp16", "fp16", {}, 0.0),
]


@pytest.mark.parametrize(("world_size", "ours", "theirs", "settings", "tolerance"), CASES, ids=str)
@on_ranks()
def test_gradients_match_ddp_with_the_hook(
    world_size: int, ours: str, theirs: str, settings: dict[str, bool], tolerance: float
) -> None:
    models = two_models(**settings)
    models[0].register_comm_hook(*HOOKS[ours]())
    state, hook = HOOKS[theirs]()
    models[1].register_comm_hook(state, waiting(hook))
    assert train(models) <= tolerance
    assert len(models[0].bucket_plan.buckets) == NUM_LAYERS
    assert_buckets_launched_early(models[0])


def in_two_steps(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Starts a collective from a callback: on rank 0 late, on the other rank before it returns."""

    def reduce_again(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        if dist.get_rank() == 0:
            time.sleep(0.05)
        again = dist.all_reduce(future.value()[0].div_(dist.get_world_size() ** 2), async_op=True)
        return again.get_future().wait()[0]

    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(reduce_again)
    if dist.get_rank() != 0:
        future.wait()
    return future


@on_ranks(2)
def test_collectives_of_callbacks() -> None:
    """Neither the next bucket's nor, after the last bucket, those that find unused parameters."""
    models = two_models(find_unused_parameters=True)
    models[0].register_comm_hook(None, in_two_steps)
    assert train(models, num_steps=2) == 0.0


@on_ranks(2)
def test_hook_registered_between_steps() -> None:
    models = two_models()
    assert train(models, num_steps=2) == 0.0
    padded = models[0].bucket_plan.num_bytes
    for each in models:
        # The gradients of the step before stay where they are, and more is added to them.
        with each.no_sync():
            loss_of(each(own_batch(9, WIDTH))).backward()
        each.register_comm_hook(None, default_hooks.allreduce_hook)
        loss_of(each(own_batch(9, WIDTH))).backward()
    assert models[0].bucket_plan.num_bytes < padded
    assert difference(*models) == 0.0
    assert train(models) == 0.0


@on_ranks(2, eagerly=True)
def test_different_hooks_raise_on_every_rank() -> None:
    """`test_divergence` has two hooks, before the first backward and after it."""
    model = ddp_compile(Mlp(WIDTH, 2), backend="eager")
    if dist.get_rank() == 0:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    said = "comm hook allreduce_hook on rank 0, gradient all-reduce on rank 1. Pass the same algorithm"
    with pytest.raises(RanksDifferError, match=said) as raised:
        one_backward(model, own_batch(0, WIDTH))
    assert str(raised.value).startswith(f"rank {dist.get_rank()}: ")


class Counting:
    """A hook that is an object, without a name or annotations."""

    def __call__(self, state: dict[str, int], bucket: Any) -> Any:
        state["num_calls"] = state.get("num_calls", 0) + 1
        return default_hooks.allreduce_hook(None, bucket)


@pytest.mark.parametrize("num_before", [0, 1])
@on_ranks(2, eagerly=True)
def test_hooks_of_one_class_are_equal(num_before: int) -> None:
    padding = [object() for _ in range(1000 * dist.get_rank())]  # so that the ranks' objects have other addresses
    models = beside_plain(lambda: Mlp(WIDTH, NUM_LAYERS), backend="eager", bucket_cap_mb=CAP_MB)
    train_beside(models, num_steps=num_before, width=WIDTH)
    models[0].register_comm_hook({"padding": padding}, Counting())
    assert largest(train_beside(models, num_steps=1, width=WIDTH)) < 1e-6


# A user's hook on the buffers, instead of the broadcast.


def average_buffers(state: dict[str, Any], buffers: Mapping[str, Tensor]) -> list[torch.futures.Future[Any]] | None:
    """The mean of the running statistics. If the forward does not read them, it is under way during the backward."""
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


def with_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("location", ["PRE_FORWARD", pytest.param("POST_FORWARD", marks=needs_ddp_to_keep_buffers)])
@on_ranks(2)
def test_buffers_match_ddp_with_the_hook(location: str) -> None:
    model, reference = pair(with_buffers, bucket_cap_mb=1e-4)
    states: list[dict[str, Any]] = [{"calls": 0, "waits": location == "PRE_FORWARD"} for _ in range(2)]
    for each, state in zip((model, reference), states, strict=True):
        each._register_buffer_comm_hook(state, average_buffers, Location[location])

    def step_of(model: Any, x: Tensor, step: int) -> None:
        one_backward(model, x)
        with torch.no_grad():  # calls no hook, so that a rank may evaluate on its own
            (copy.deepcopy(model.module) if model is reference else model).eval()(x)
            model.train()

    assert largest(train_beside((model, reference), step_of, 5, width=WIDTH, rows=6)) < 1e-6
    both = zip(model.buffers(), reference.buffers(), strict=True)
    assert largest(relative_difference(ours.float(), theirs.float()) for ours, theirs in both) < 1e-6
    assert states[0] == states[1] and states[0]["calls"] == 5
    assert states[0]["names"] == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]


@on_ranks(2)
def test_when_a_buffer_hook_is_called() -> None:
    counts = []
    for ignore in ([], ["1.running_mean", "1.running_var", "1.num_batches_tracked"]):
        model: Any = ddp_compile(with_buffers(), backend="eager", parameters_to_ignore=ignore)
        state = {"calls": 0}
        model._register_buffer_comm_hook(state, average_buffers, "POST_FORWARD")
        with model.no_sync():
            loss_of(model(torch.randn(6, WIDTH))).backward()
        counts.append(state["calls"])
        with model.join():
            for _ in range(2 + dist.get_rank()):
                loss_of(model(torch.randn(6, WIDTH))).backward()
        counts.append(state["calls"])
    assert counts == [0, 3, 0, 0]


@on_ranks(2)
def test_futures_of_lone_forwards_are_dropped() -> None:
    futures: list[weakref.ReferenceType[Any]] = []

    def noted(state: dict[str, Any], buffers: Mapping[str, Tensor]) -> list[torch.futures.Future[Any]]:
        given = average_buffers(state, buffers) or []
        futures.extend(map(weakref.ref, given))
        return given

    model: Any = ddp_compile(with_buffers(), backend="eager")
    model._register_buffer_comm_hook({"calls": 0}, noted, "POST_FORWARD")
    for _ in range(20):
        model(torch.randn(6, WIDTH))
        dist.barrier()
    assert sum(future() is not None for future in futures) <= 4


def test_other_objects_are_refused(single_rank_group: None) -> None:
    model: Any = ddp_compile(with_buffers(), backend="eager")
    with pytest.raises(TypeError, match="the buffer comm hook 'average' is not callable"):
        model._register_buffer_comm_hook(None, "average")
    with pytest.raises(ValueError, match="comm_hook_location='LATER' must be PRE_FORWARD or POST_FORWARD"):
        model._register_buffer_comm_hook(None, average_buffers, "LATER")


@on_ranks(2)
def test_sparse_gradients() -> None:
    models = pair(lambda: nn.Sequential(nn.Embedding(50, 6, sparse=True), nn.Linear(6, 6)))
    for each in models:
        each.register_comm_hook(None, default_hooks.allreduce_hook)
    for seed in range(2):
        torch.manual_seed(10 * seed + dist.get_rank())
        tokens = torch.randint(0, 50, (4,))
        for each in models:
            loss_of(each(tokens)).backward()
    ours, theirs = (next(each.parameters()).grad for each in models)
    assert ours.is_sparse and torch.equal(ours.to_dense(), theirs.to_dense())
