"""Ranks that do not do the same: an error naming rank and difference, or exact means; docs/divergence.md lists them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from differing_ranks import (
    WIDTH,
    evaluate,
    evaluate_with_gradients,
    forward_and_backward,
    make_model,
    some_rows,
    with_batch_norm,
)
from in_ci import only
from models import loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.algorithms import ByteGrad, GradientAllReduce
from ddp_compile.errors import RanksDifferError

Ranks = Callable[[int], RankPool]


# Ranks that get out of step without anybody waiting in vain


@torch.compiler.set_stance("force_eager")
def leave_a_backward_out(culprit: int) -> None:
    model = make_model()
    for step in range(4):
        loss = loss_of(model(some_rows()))
        if (dist.get_rank(), step) != (culprit, 1):
            loss.backward()


@torch.compiler.set_stance("force_eager")
def forward_once_more(culprit: int) -> None:
    model = make_model()
    for step in range(4):
        if (dist.get_rank(), step) == (culprit, 1):
            model(some_rows())
        loss_of(model(some_rows())).backward()


@torch.compiler.set_stance("force_eager")
def call_backward_twice(culprit: int) -> None:
    model = make_model()
    for step in range(5):
        loss = loss_of(model(some_rows()))
        loss.backward(retain_graph=True)
        if (dist.get_rank(), step) == (culprit, 1):
            loss.backward()


@pytest.mark.parametrize(
    ("scenario", "difference", "iteration_number"),
    [
        (leave_a_backward_out, "training forwards without a backward", 2),
        (forward_once_more, "training forwards without a backward", 2),
        (call_backward_twice, "backwards without a forward before them", 4),
    ],
)
def test_every_rank_raises_at_the_next_agreement_point(
    scenario: Callable[[int], None], difference: str, iteration_number: int, ranks: Ranks
) -> None:
    for rank, failure in enumerate(ranks(2).run_expecting_failures(scenario, 1)):
        assert failure.kind == "RanksDifferError"
        assert failure.message.startswith(f"rank {rank}: at the end of iteration {iteration_number} ")
        assert f"{difference}: 0 on rank 0, 1 on rank 1." in failure.message


def test_one_rank_of_three_is_named(ranks: Ranks) -> None:
    for failure in ranks(3).run_expecting_failures(leave_a_backward_out, 1):
        assert failure.kind == "RanksDifferError"
        assert "training forwards without a backward: 1 on rank 1, 0 on ranks 0, 2." in failure.message
        assert "torch.no_grad()" in failure.message


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_no_rank_goes_on_after_the_error() -> None:
    with pytest.raises(RuntimeError, match="out of step"):
        model = make_model()
        loss_of(model(some_rows())).backward()
        if dist.get_rank() == 1:
            model(some_rows())
        loss_of(model(some_rows())).backward()
    with pytest.raises(RuntimeError) as refused:
        model(some_rows())
    rank = dist.get_rank()
    refusal = str(refused.value)
    assert refusal.startswith(f"rank {rank}: ") and "Start again from a checkpoint" in refusal


# Two models in one process group


def two_models_in_another_order(first: int, settings: dict[str, Any]) -> list[Any]:
    """Rank 1 calls the backwards in the other order from a step on; the first model's gradients, and the error."""
    torch.manual_seed(0)
    modules = nn.Linear(4, 4, bias=False), nn.Sequential(nn.Linear(4, 4, bias=False))
    models = [ddp_compile(module, backend="aot_eager", **settings) for module in modules]
    seen = []
    try:
        for step in range(8):
            losses = [model(torch.ones(1, 4)).sum() * (number + 1) for number, model in enumerate(models)]
            in_other_order = dist.get_rank() == 1 and step >= first
            for loss in reversed(losses) if in_other_order else losses:
                loss.backward()
            seen.append(modules[0].weight.grad[0, 0].item())
            modules[0].zero_grad()
    except RanksDifferError as error:
        return [*seen, str(error)]
    return seen


FIRST_BACKWARDS = "the ranks have come to the first backwards of different models: model 1 (Linear) on rank 0, model"
OUT_OF_STEP = "at the end of iteration {} the ranks are out of step. iteration {} of the process group paired different"


@pytest.mark.parametrize(
    ("first", "settings", "said"),
    [
        (0, {"split": "forward"}, FIRST_BACKWARDS),
        (2, {"split": "forward"}, OUT_OF_STEP.format(4, 5)),
        # The message at the end of each iteration says whose iteration it is.
        (4, {"find_unused_parameters": True}, OUT_OF_STEP.format(5, 9)),
    ],
)
def test_backwards_of_two_models_in_another_order(
    first: int, settings: dict[str, Any], said: str, ranks: Ranks
) -> None:
    for rank, (*gradients, error) in enumerate(ranks(2).run(two_models_in_another_order, first, settings)):
        assert gradients[:first] == [1.0] * first
        assert str(error).startswith(f"rank {rank}: {said}")
        assert "model 2 (Sequential) on rank 1" in error and "a process group of its own" in error


@torch.compiler.set_stance("force_eager")
def forwards_in_another_order() -> str:
    """On rank 1 in the second step, before which models that run eagerly pack their buckets anew."""
    models = [ddp_compile(module, backend="eager") for module in (nn.Linear(4, 4), nn.Linear(3, 4))]
    inputs = [torch.ones(1, 4), torch.ones(1, 3)]
    try:
        for step in range(2):
            in_order = [*zip(models, inputs, strict=True)]
            losses = [model(x).sum() for model, x in (reversed(in_order) if step * dist.get_rank() else in_order)]
            for loss in losses:
                loss.backward()
    except RanksDifferError as error:
        return str(error)
    return "nothing"


def test_another_models_bucket_plan_is_refused_by_name(ranks: Ranks) -> None:
    _, said = ranks(2).run_expecting_failures(forwards_in_another_order, timeout_s=2.0)
    assert said.startswith("rank 1: the bucket plan that rank 0 has sent is not that of model 2 (Linear): it has Gr")


@on_ranks(2)
def test_algorithms_with_process_groups_of_their_own_are_compared_by_themselves() -> None:
    models = [
        ddp_compile(nn.Linear(4, 4), backend="eager", algorithm=algorithm)
        for algorithm in (GradientAllReduce(), ByteGrad(), GradientAllReduce())
    ]
    shard_optimizer(torch.optim.SGD(models[2].parameters(), lr=0.1), models[2])
    assert [model.comm_algorithm.shares_process_group for model in models] == [True, False, False]


# Ranks that differ, and yet average what they should


def forward_in_no_sync(model: nn.Module) -> None:
    with getattr(model, "no_sync", contextlib.nullcontext)():  # which the plain copy has not
        model(some_rows())


def two_forwards_for_one_backward(model: nn.Module) -> Tensor:
    return loss_of(model(some_rows())) + loss_of(model(some_rows()))


def recompile(model: nn.Module) -> Tensor:
    """With dynamic=False every number of rows is a graph of its own."""
    num_rows = int(torch.randint(5, 500, ()))
    return loss_of(model(torch.randn(num_rows, WIDTH)))


def difference_to_the_mean_of(plain: nn.Module, model: nn.Module) -> float:
    """Largest relative difference of any gradient to the mean over the ranks of the plain module's."""
    worst = 0.0
    for parameter, alone in zip(model.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(alone.grad)
        worst = max(worst, relative_difference(parameter.grad, alone.grad / dist.get_world_size()))
    return worst


@pytest.mark.parametrize(
    "only_rank_1",
    only(
        [evaluate, forward_in_no_sync, two_forwards_for_one_backward, recompile],
        [evaluate, evaluate_with_gradients, forward_in_no_sync, two_forwards_for_one_backward, recompile],
    ),
)
@on_ranks(2)
def test_what_one_rank_may_do_alone(only_rank_1: Callable[[nn.Module], Tensor | None], each_split: str) -> None:
    model = make_model(dynamic=False, backend="aot_eager")
    worst = 0.0
    for iteration_number in range(5):
        model.zero_grad()
        plain = copy.deepcopy(model)
        for each in (plain, model):
            torch.manual_seed(10 * iteration_number + dist.get_rank())
            loss = only_rank_1(each) if dist.get_rank() == 1 else None
            (loss_of(each(some_rows())) if loss is None else loss).backward()
        worst = max(worst, difference_to_the_mean_of(plain, model))
    assert worst < 1e-6


@on_ranks(2)
def test_one_rank_in_evaluation_mode_is_averaged_as_by_ddp() -> None:
    models = [ddp_compile(with_batch_norm(), backend="aot_eager"), DistributedDataParallel(with_batch_norm())]
    worst = 0.0
    for number in range(4):
        for model in models:
            torch.manual_seed(10 * number + dist.get_rank())
            model.train(not (dist.get_rank() == 1 and number % 2))
            model.zero_grad()
            forward_and_backward(model)
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            worst = max(worst, relative_difference(ours.grad, theirs.grad))
    # A bias before BatchNorm has a gradient of zero but for rounding; in evaluation mode it has another one.
    assert worst < 1e-5


@on_ranks(2)
def test_parameters_that_one_rank_shares_are_refused_on_every_rank() -> None:
    with pytest.raises(RanksDifferError) as raised:
        head = nn.Linear(WIDTH, WIDTH)
        kept = ddp_compile(nn.Sequential(head), backend="eager")
        if dist.get_rank() == 0:
            kept.unwrap()
        ddp_compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), head), backend="eager")
    message = str(raised.value)
    assert "another replicated module reduces=none on rank 0" in message
    assert "1.weight is 0.weight of a Sequential" in message


# Comm hooks


@pytest.mark.parametrize("iterations_before", [0, 1])
@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_different_comm_hooks_are_refused_on_every_rank(iterations_before: int) -> None:
    with pytest.raises(RanksDifferError) as raised:
        model = make_model()
        for _ in range(iterations_before):
            loss_of(model(some_rows())).backward()
        hook = default_hooks.fp16_compress_hook if dist.get_rank() else default_hooks.allreduce_hook
        model.register_comm_hook(None, hook)
        loss_of(model(some_rows())).backward()
    rank = dist.get_rank()
    message = str(raised.value)
    assert message.startswith(f"rank {rank}: ")
    assert "comm hook allreduce_hook on rank 0, comm hook fp16_compress_hook on rank 1" in message


class HookObject:
    def __call__(self, state: Any, bucket: Any) -> Any:
        return default_hooks.allreduce_hook(None, bucket)


@pytest.mark.parametrize("iterations_before", [0, 1])
@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_hooks_that_are_objects_of_one_class_are_equal(iterations_before: int) -> None:
    model = make_model()
    for _ in range(iterations_before):
        loss_of(model(some_rows())).backward()
    padding = [object() for _ in range(1000 * dist.get_rank())]  # so that the ranks' objects have other addresses
    model.register_comm_hook(padding, HookObject())
    model.zero_grad()
    plain, x = copy.deepcopy(model), some_rows()
    for each in (plain, model):
        loss_of(each(x)).backward()
    assert difference_to_the_mean_of(plain, model) < 1e-6
