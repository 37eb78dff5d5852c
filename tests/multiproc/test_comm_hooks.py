"""Comm hooks, torch's own and others, against eager DistributedDataParallel with the same hook."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, assert_buckets_launched_early, loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import RanksDifferError, ReductionError, comm_hooks, ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

Ranks = Callable[[int], RankPool]
Hook = Callable[..., Any]

WIDTH, NUM_LAYERS, CAP_MB, NUM_STEPS = 33, 4, 0.004, 5


def power_sgd(hook: Hook, **settings: Any) -> tuple[Any, Hook]:
    """Compresses from the third step on, so that error feedback and warm start act in the fourth."""
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, **settings), hook


QUANTIZES_ON_GLOO = torch.__version__ >= "2.15"  # compared by release


def post_local_sgd() -> tuple[Any, Hook]:
    """From the third step on every rank goes its own way."""
    alone, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    return state, post_localSGD_hook.post_localSGD_hook


def other_tensor(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The result lies elsewhere and is of another dtype."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().double() * 3)
    return future


def resizing(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Makes the buffer's memory larger, as torch's batched PowerSGD does (which itself fails in torch 2.13)."""
    flat = bucket.buffer()
    num_elements = flat.numel()
    flat.resize_(2 * num_elements)[num_elements:].fill_(float("nan"))
    return default_hooks.allreduce_hook(None, bucket).then(lambda future: future.value().resize_(num_elements))


class Counting:
    """A hook that is an object, without a name or annotations."""

    def __call__(self, state: dict[str, int], bucket: Any) -> Any:
        state["num_calls"] = state.get("num_calls", 0) + 1
        return default_hooks.allreduce_hook(None, bucket)


# Each makes a new state and says what hook it is for.
HOOKS: dict[str, Callable[[], tuple[Any, Hook]]] = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "bf16": lambda: (None, default_hooks.bf16_compress_hook),
    "fp16 wrapper": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16 wrapper": lambda: (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
    "power": lambda: power_sgd(powerSGD_hook.powerSGD_hook),
    "power in batches": lambda: power_sgd(powerSGD_hook.powerSGD_hook, batch_tensors_with_same_shape=True),
    "power from nothing": lambda: power_sgd(
        powerSGD_hook.powerSGD_hook, use_error_feedback=False, warm_start=False, matrix_approximation_rank=3
    ),
    "fp16 power": lambda: power_sgd(default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "post local": post_local_sgd,
    "noop": lambda: (None, debugging_hooks.noop_hook),
    "other tensor": lambda: (None, other_tensor),
    "resizing": lambda: (None, resizing),
    "object": lambda: ({}, Counting()),
    "ours allreduce": lambda: (None, comm_hooks.allreduce_hook),
    "ours fp16": lambda: (None, comm_hooks.fp16_compress_hook),
    "ours bf16": lambda: (None, comm_hooks.bf16_compress_hook),
}


def waiting(hook: Hook) -> Hook:
    """For DistributedDataParallel, which hangs on gloo where callbacks of two buckets start collectives.

    It also takes only functions, on the CPU none that is named bf16_compress_hook, and no annotations that are text.
    """

    def wait(state, bucket):
        future = hook(state, bucket)
        future.wait()
        return future

    return wait


def two_models(**settings: Any) -> tuple[Any, DistributedDataParallel]:
    settings = {"bucket_cap_mb": CAP_MB, "gradient_as_bucket_view": True, **settings}
    torch.manual_seed(3)
    reference = DistributedDataParallel(Mlp(WIDTH, NUM_LAYERS), **settings)
    torch.manual_seed(3)
    return ddp_compile(Mlp(WIDTH, NUM_LAYERS), backend="aot_eager", **settings), reference


def train(model: Any, reference: nn.Module, num_steps: int = NUM_STEPS) -> float:
    """Largest relative difference of any gradient in any step."""
    worst = 0.0
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for _ in range(num_steps):
        x = torch.randn(4, WIDTH)
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(each(x)).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            worst = max(worst, relative_difference(p.grad, q.grad))
        for optimizer in optimizers:
            optimizer.step()
    return worst


def train_with_hook(ours: str, theirs: str, **settings: Any) -> float:
    model, reference = two_models(**settings)
    model.register_comm_hook(*HOOKS[ours]())
    state, hook = HOOKS[theirs]()
    reference.register_comm_hook(state, waiting(hook))
    torch.manual_seed(100 + dist.get_rank())
    worst = train(model, reference)
    assert len(model.bucket_plan.buckets) == NUM_LAYERS
    assert_buckets_launched_early(model)
    return worst


# Those that are made of these in CI by a wrapper, or for another format, are left out of it, and what three ranks have.
HOOKS_IN_CI = ["power", "other tensor", "post local"]


@pytest.mark.parametrize("name", only(HOOKS_IN_CI, [name for name in HOOKS if not name.startswith("ours")]))
def test_gradients_are_those_of_ddp_with_the_same_hook(name: str, ranks: Ranks) -> None:
    assert ranks(2).run(train_with_hook, name, name) == [0.0, 0.0]


def test_results_are_copied_back_where_gradients_are_no_views(ranks: Ranks) -> None:
    name = "other tensor"
    assert ranks(2).run(train_with_hook, name, name, gradient_as_bucket_view=False) == [0.0, 0.0]


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
def test_collectives_of_callbacks_meet_no_others() -> None:
    model, reference = two_models(find_unused_parameters=True)
    model.register_comm_hook(None, in_two_steps)
    torch.manual_seed(100 + dist.get_rank())
    # Neither the next bucket's nor, after the last bucket, those that find unused parameters.
    assert train(model, reference, num_steps=2) == 0.0


@pytest.mark.parametrize(("name", "tolerance"), only([("allreduce", 1e-6)], [("allreduce", 1e-6), ("fp16", 1e-2)]))
def test_three_ranks_agree_with_ddp(name: str, tolerance: float, ranks: Ranks) -> None:
    assert max(ranks(3).run(train_with_hook, name, name)) < tolerance


# Ours round once where torch's round twice.
@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance"),
    # The others are those of `test_builtin_hooks_are_ours`.
    only(
        [("ours bf16", "bf16", 2e-2)],
        [("ours allreduce", "allreduce", 0.0), ("ours fp16", "fp16", 2e-3), ("ours bf16", "bf16", 2e-2)],
    ),
)
def test_our_hooks_agree_with_torchs(ours: str, theirs: str, tolerance: float, ranks: Ranks) -> None:
    assert max(ranks(2).run(train_with_hook, ours, theirs)) <= tolerance


@pytest.mark.parametrize(
    ("name", "tolerance"), only([("FP16_COMPRESS", 2e-3)], [("ALLREDUCE", 0.0), ("FP16_COMPRESS", 2e-3)])
)
@on_ranks(2)
def test_builtin_hooks_are_ours(name: str, tolerance: float) -> None:
    model, reference = two_models()
    model.register_comm_hook(None, getattr(dist.BuiltinCommHookType, name))
    reference._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
    torch.manual_seed(100 + dist.get_rank())
    assert train(model, reference) <= tolerance


@on_ranks(2)
def test_a_hook_can_be_registered_between_steps() -> None:
    model, reference = two_models()
    torch.manual_seed(100 + dist.get_rank())
    before = train(model, reference, num_steps=2)
    padded = model.bucket_plan.num_bytes
    x = torch.randn(4, WIDTH)
    for each in (model, reference):
        # The gradients of the step before stay where they are, and more is added to them.
        with each.no_sync():
            loss_of(each(x)).backward()
        each.register_comm_hook(None, default_hooks.allreduce_hook)
        loss_of(each(x)).backward()
    assert model.bucket_plan.num_bytes < padded
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    worst = max(relative_difference(p.grad, q.grad) for p, q in pairs)
    assert max(before, worst, train(model, reference)) == 0.0


@on_ranks(2)
def test_a_hook_gets_sparse_gradients_as_they_are() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(50, 6, sparse=True), nn.Linear(6, 6))
    reference = nn.Sequential(nn.Embedding(50, 6, sparse=True), nn.Linear(6, 6))
    reference.load_state_dict(model.state_dict())
    worst = 0.0
    for hook in (default_hooks.allreduce_hook, comm_hooks.allreduce_hook, comm_hooks.bf16_compress_hook):
        with_ddp = DistributedDataParallel(reference)
        with_ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        model = ddp_compile(model, backend="aot_eager")
        model.register_comm_hook(None, hook)
        torch.manual_seed(dist.get_rank())
        for each in (model, with_ddp):
            each.zero_grad()
        for _ in range(2):
            tokens = torch.randint(0, 50, (4,))
            for each in (model, with_ddp):
                loss_of(each(tokens)).backward()
        assert model[0].weight.grad.is_sparse
        ours, theirs = model[0].weight.grad.to_dense(), reference[0].weight.grad.to_dense()
        worst = max(worst, relative_difference(ours, theirs))
        model = model.unwrap()
    assert worst == 0.0


@pytest.mark.skipif(QUANTIZES_ON_GLOO, reason="gloo runs torch's quantization hooks since torch 2.15")
@on_ranks(2)
def test_a_hook_of_torchs_that_gloo_cannot_run_is_named() -> None:
    with pytest.raises(ReductionError) as raised:
        model = ddp_compile(nn.Linear(4, 4), backend="aot_eager")
        model.register_comm_hook(None, quantization_hooks.quantization_pertensor_hook)
        loss_of(model(torch.randn(2, 4))).backward()
    assert "quantization_pertensor_hook failed on bucket 0" in str(raised.value)


def gradient_with_quantization(replicate: Callable[[nn.Module], Any]) -> Tensor:
    torch.manual_seed(5)
    module = nn.Linear(16, 16)
    model = replicate(module)
    model.register_comm_hook(None, quantization_hooks.quantization_perchannel_hook)
    torch.manual_seed(dist.get_rank())
    loss_of(model(torch.randn(2, 16))).backward()
    assert module.weight.grad is not None
    return module.weight.grad


@pytest.mark.skipif(not QUANTIZES_ON_GLOO, reason="gloo runs torch's quantization hooks since torch 2.15")
@on_ranks(2)
def test_gradients_are_those_of_ddp_with_torchs_quantization() -> None:
    ours = gradient_with_quantization(functools.partial(ddp_compile, backend="aot_eager"))
    assert relative_difference(ours, gradient_with_quantization(DistributedDataParallel)) == 0.0


@on_ranks(2)
def test_a_hook_on_one_rank_only_is_an_error_on_both() -> None:
    with pytest.raises(RanksDifferError) as raised:
        model = ddp_compile(Mlp(WIDTH, NUM_LAYERS), backend="aot_eager")
        if dist.get_rank() == 0:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        loss_of(model(torch.randn(2, WIDTH))).backward()
    assert "comm hook allreduce_hook on rank 0, gradient all-reduce on rank 1. Pass the same algorithm" in str(
        raised.value
    )
