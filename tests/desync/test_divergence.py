"""Ranks that differ get an error that names rank and difference. `tests/fuzz` goes through the kinds of differences."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import Ranks, on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import Parameter

from ddp_compile import GradientSpec, ddp_compile, plan_buckets
from ddp_compile.errors import DDPCompileError, RanksDifferError
from ddp_compile.runtime.desync.local_steps import LocalSteps

FIRST_BACKWARDS = "the ranks have reached the first backwards of different models: model 1 (Linear) on rank 0, model"
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
@on_ranks(2)
def test_backwards_in_another_order(first: int, settings: dict[str, Any], said: str) -> None:
    """From some step on, rank 1 swaps the backwards."""
    torch.manual_seed(0)
    modules = nn.Linear(4, 4, bias=False), nn.Sequential(nn.Linear(4, 4, bias=False))
    models = [ddp_compile(module, backend="aot_eager", **settings) for module in modules]
    gradients = []
    with pytest.raises(RanksDifferError) as raised:
        for step in range(8):
            losses = [model(torch.ones(1, 4)).sum() * (number + 1) for number, model in enumerate(models)]
            in_other_order = dist.get_rank() == 1 and step >= first
            for loss in reversed(losses) if in_other_order else losses:
                loss.backward()
            gradients.append(modules[0].weight.grad[0, 0].item())
            modules[0].zero_grad()
    assert gradients[:first] == [1.0] * first
    error = str(raised.value)
    assert error.startswith(f"rank {dist.get_rank()}: {said}")
    assert "model 2 (Sequential) on rank 1" in error and "a process group of its own" in error


class WithBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("scale", torch.ones(4))


@on_ranks(2, eagerly=True)
def test_buffers_in_another_order() -> None:
    models = [ddp_compile(WithBuffer(), backend="eager") for _ in range(2)]

    def train(in_other_order: bool) -> None:
        outputs = [model(torch.randn(3, 4)).sum() for model in (reversed(models) if in_other_order else models)]
        sum(outputs).backward()

    for _ in range(3):
        train(in_other_order=False)
    said = r"the buffers of model 1 \(WithBuffer\) on rank 0, the buffers of model 2 \(WithBuffer\) on rank 1"
    with pytest.raises(RanksDifferError, match=said):
        train(in_other_order=dist.get_rank() == 1)


@torch.compiler.set_stance("force_eager")
def finalize_in_another_order() -> str:
    """On rank 1, in the first iteration, at whose end models that run eagerly pack their buckets again."""
    models = [ddp_compile(module, backend="eager") for module in (nn.Linear(4, 4), nn.Linear(3, 4))]
    for model, x in zip(models, (torch.ones(1, 4), torch.ones(1, 3)), strict=True):
        model.require_manual_backward_finalization = True
        model(x).sum().backward()
    try:
        for model in reversed(models) if dist.get_rank() else models:
            model.finalize_backward()
    except RanksDifferError as error:
        return str(error)
    return "nothing"


def test_plan_of_another_model(ranks: Ranks) -> None:
    _, said = ranks(2).run_expecting_failures(finalize_in_another_order, timeout_s=2.0)
    assert said.startswith("rank 1: the bucket plan that rank 0 has sent is not that of model 2 (Linear): it has Gr")


@on_ranks(2)
def test_saved_plans_that_differ() -> None:
    with tempfile.TemporaryDirectory() as folder:
        gradients = [GradientSpec(i, name, n, "float32", "cpu") for i, name, n in ((0, "weight", 16), (1, "bias", 4))]
        for cap_bytes in (4, 400):
            plan_buckets(gradients[::-1], cap_bytes).save(f"{folder}/{cap_bytes}")
        model = ddp_compile(nn.Linear(4, 4), backend="eager", bucket_plan=f"{folder}/4")
        model(torch.ones(1, 4)).sum().backward()
        assert len(model.bucket_plan.buckets) == 2
        for mine in (4 if dist.get_rank() else 400, 4 if dist.get_rank() else "none"):
            with pytest.raises(RanksDifferError, match="saved bucket plan="):
                ddp_compile(nn.Linear(4, 4), backend="eager", bucket_plan=f"{folder}/{mine}")


def replicate_in(group: dist.ProcessGroup, width: int = 4, **settings: Any) -> Any:
    return ddp_compile(nn.Linear(4, width), process_group=group, backend="eager", **settings)


def register_another_hook(group: dist.ProcessGroup, num_backwards_before: int) -> None:
    model = replicate_in(group)
    hooks = {1: default_hooks.allreduce_hook, 2: default_hooks.bf16_compress_hook}
    for step in range(2):
        if step == num_backwards_before:
            model.register_comm_hook(None, hooks[dist.get_rank()])
        model(torch.ones(1, 4)).sum().backward()


def leave_a_forward_without_backward(group: dist.ProcessGroup) -> None:
    model = replicate_in(group)
    for step in range(2):
        if (dist.get_rank(), step) == (2, 1):
            model(torch.ones(1, 4))
        model(torch.ones(1, 4)).sum().backward()


@on_ranks(3, eagerly=True)
def test_subgroup_is_named_by_global_ranks() -> None:
    """Ranks 1 and 2 differ in process groups, whose own numbers for them are 0 and 1."""
    said, rank = [], dist.get_rank()
    for differ in (
        lambda group: replicate_in(group, width=rank),
        lambda group: register_another_hook(group, 0),
        lambda group: register_another_hook(group, 1),
        leave_a_forward_without_backward,
    ):
        group = dist.new_group([1, 2])
        if rank > 0:
            with pytest.raises(DDPCompileError) as raised:
                differ(group)
            said.append(str(raised.value))
    if rank > 0:
        assert all(error.startswith(f"rank {rank}: ") for error in said)
        model, hook, later_hook, forward = said
        assert "float32[1, 4]" in model and " on rank 1 is " in model and " on rank 2. Build" in model
        for error in (hook, later_hook):
            assert "allreduce_hook on rank 1, comm hook bf16_compress_hook on rank 2" in error
        assert "without a backward: 0 on rank 1, " in forward and " on rank 2. Call" in forward


@on_ranks(2)
def test_parameters_that_one_rank_shares() -> None:
    with pytest.raises(RanksDifferError) as raised:
        head = nn.Linear(4, 4)
        kept = ddp_compile(nn.Sequential(head), backend="eager")
        if dist.get_rank() == 0:
            kept.unwrap()
        ddp_compile(nn.Sequential(nn.Linear(4, 4), head), backend="eager")
    message = str(raised.value)
    assert "another replicated module reduces=none on rank 0" in message
    assert "1.weight is 0.weight of a Sequential" in message


def step(parameter: Parameter, **settings: bool) -> None:
    torch.optim.SGD([parameter], lr=0.1, **settings).step()


def step_another(_parameter: Parameter) -> None:
    other = Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    step(other, fused=True)


@torch.no_grad()
def swap_for_an_evaluation(parameter: Parameter) -> None:
    parameter.copy_(torch.zeros(3))


@pytest.mark.parametrize(
    ("between", "then", "found"),
    [
        (step, "dropped", 1),
        (lambda parameter: step(parameter, fused=True), "dropped", 1),
        (step, "zeroed", 1),
        (step_another, "dropped", 0),
        (lambda _parameter: None, "dropped", 0),  # a bad micro-batch
        (swap_for_an_evaluation, "kept", 0),
    ],
)
def test_steps_found(between: Callable[[Parameter], None], then: str, found: int) -> None:
    parameter = Parameter(torch.ones(3))
    steps = LocalSteps([parameter])
    for _ in range(2):
        parameter.sum().backward()
        steps.gradient_arrives(0)
    between(parameter)
    assert parameter.grad is not None
    if then == "zeroed":
        parameter.grad.zero_()
    if then == "dropped":
        parameter.grad = None
    steps.end_watch()
    parameter.grad = torch.ones(3)  # of a backward that was reduced
    step(parameter)
    parameter.grad = None
    steps.end_watch()
    assert steps.num_found == found


@on_ranks(2, eagerly=True)
def test_ranks_accumulate_different_numbers_of_micro_batches_after_all_forwards() -> None:
    model: Any = ddp_compile(nn.Linear(2, 2), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        with model.no_sync():
            losses = [model(torch.ones(1, 2)).sum() for _ in range(1 + dist.get_rank())]
        losses.append(model(torch.ones(1, 2)).sum())
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # The ranks still compare parameters.
    with torch.no_grad():
        model.weight[0, 0] += dist.get_rank()
    with pytest.raises(RanksDifferError, match="weight"):
        for _ in range(5):
            model(torch.ones(1, 2)).sum().backward()
