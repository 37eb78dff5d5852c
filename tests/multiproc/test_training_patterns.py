"""Ways to train that have little to do with each other, each against eager DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, loss_of, needs_ddp_to_keep_buffers, relative_difference
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_compile import GradientArrivalError, ParametersChangedError, ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

Ranks = Callable[[int], RankPool]
Step = Callable[[nn.Module, Tensor, int], None]


def one_backward(model: nn.Module, x: Tensor, step: int) -> None:
    loss_of(model(x)).backward()


def regulariser_by_itself(model: nn.Module, x: Tensor, step: int) -> None:
    loss_of(model(x)).backward()
    (0.1 * next(model.parameters()).square().sum()).backward()


def clamp_gradient(parameter: nn.Parameter) -> None:
    parameter.grad.clamp_(-1e-3, 1e-3)


def regulariser_first(model: nn.Module, x: Tensor, step: int) -> None:
    (0.1 * next(model.parameters()).square().sum()).backward()
    loss_of(model(x)).backward()


def watched_inside_no_sync(model: nn.Module, x: Tensor, step: int) -> None:
    output = model(x)
    with model.no_sync():
        model(2 * x)
    loss_of(output).backward()


def user_hook_after(model: nn.Module, x: Tensor, step: int) -> None:
    if step in (0, 2):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(clamp_gradient)
    loss_of(model(x)).backward()


def two_forwards(model: nn.Module, x: Tensor, step: int) -> None:
    (loss_of(model(x)) + loss_of(model(2 * x))).backward()


def gradients_detached_in_between(model: nn.Module, x: Tensor, step: int) -> None:
    loss_of(model(x)).backward()
    for parameter in model.parameters():
        parameter.grad.detach_().mul_(0.5)
    loss_of(model(x)).backward()


def gradients_replaced_in_between(model: nn.Module, x: Tensor, step: int) -> None:
    loss_of(model(x)).backward()
    for parameter in model.parameters():
        parameter.grad = 0.5 * parameter.grad
    loss_of(model(x)).backward()


def gradients_freed_in_between(model: nn.Module, x: Tensor, step: int) -> None:
    """Of every other parameter, so that a bucket finds some of its gradients gone and others where they were."""
    loss_of(model(x)).backward()
    for parameter in list(model.parameters())[::2]:
        parameter.grad = None
    loss_of(model(x)).backward()


def gradients_zeroed_in_between(model: nn.Module, x: Tensor, step: int) -> None:
    loss_of(model(x)).backward()
    model.zero_grad(set_to_none=False)
    loss_of(model(2 * x)).backward()


def under_autocast(model: nn.Module, x: Tensor, step: int) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model(x))
    loss.backward()


def backward_in_inference_mode(model: nn.Module, x: Tensor, step: int) -> None:
    loss = loss_of(model(x))
    with torch.inference_mode():
        loss.backward()


def unscaled_and_clipped(model: nn.Module, x: Tensor, step: int) -> None:
    (1024 * loss_of(model(x))).backward()
    for parameter in model.parameters():
        parameter.grad.div_(1024)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


class Checkpointed(Mlp):
    """A graph break before each layer, so that reentrant checkpoints open passes inside the backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = checkpoint(layer, x.requires_grad_() if x.is_leaf else x, use_reentrant=True)
        return x


class CheckpointedWithoutReentrance(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class UsedTwice(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu(super().forward(x)))


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(33, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Linear(33, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def small_mlp() -> nn.Module:
    return Mlp(width=33, num_layers=4)


PATTERNS: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "regulariser_by_itself": (small_mlp, regulariser_by_itself),
    "regulariser_first": (small_mlp, regulariser_first),
    "watched_inside_no_sync": (small_mlp, watched_inside_no_sync),
    "user_hook_after": (small_mlp, user_hook_after),
    "two_forwards_with_batch_norm": (WithBatchNorm, two_forwards),
    "gradients_detached_in_between": (small_mlp, gradients_detached_in_between),
    "gradients_replaced_in_between": (small_mlp, gradients_replaced_in_between),
    "gradients_freed_in_between": (small_mlp, gradients_freed_in_between),
    "gradients_zeroed_in_between": (small_mlp, gradients_zeroed_in_between),
    "unscaled_and_clipped": (small_mlp, unscaled_and_clipped),
    "backward_in_inference_mode": (small_mlp, backward_in_inference_mode),
    "under_autocast": (small_mlp, under_autocast),
    "layer_used_twice": (lambda: UsedTwice(33, 2), one_backward),
    "reentrant_checkpoints": (lambda: Checkpointed(33, 4), one_backward),
    "checkpoints_without_reentrance": (lambda: CheckpointedWithoutReentrance(33, 4), one_backward),
}


def train(pattern: str) -> float:
    make, step_of = PATTERNS[pattern]
    torch.manual_seed(3)
    reference = make()
    torch.manual_seed(3)
    model = ddp_compile(make(), bucket_cap_mb=0.005, backend="aot_eager")
    with_ddp = DistributedDataParallel(reference)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, with_ddp)]
    worst = 0.0
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(6, 33)
        for each, optimizer in zip((model, with_ddp), optimizers, strict=True):
            optimizer.zero_grad()
            step_of(each, x, step)
        for p, q in zip(model.parameters(), with_ddp.parameters(), strict=True):
            worst = max(worst, relative_difference(p.grad, q.grad))
        for optimizer in optimizers:
            optimizer.step()
    return worst


# `test_algorithms` trains in the second and the third one, checkpoints are in `test_regions`, and the others are as the
# ones that are left.
LEFT_OUT_IN_CI = {
    "checkpoints_without_reentrance",
    "regulariser_first",
    "watched_inside_no_sync",
    "gradients_replaced_in_between",
    "gradients_detached_in_between",
}


def marks_of(pattern: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.long] if pattern in LEFT_OUT_IN_CI else []
    return [*marks, needs_ddp_to_keep_buffers] if pattern == "two_forwards_with_batch_norm" else marks


@pytest.mark.parametrize("pattern", [pytest.param(name, marks=marks_of(name)) for name in PATTERNS])
def test_gradients_equal_ddps(pattern: str, ranks: Ranks) -> None:
    # A bias before BatchNorm has a gradient of zero but for rounding, which regrouping changes.
    tolerance = 0.0 if pattern != "two_forwards_with_batch_norm" else 1e-5
    assert max(ranks(2).run(train, pattern)) <= tolerance


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left = self.left(x)
        torch._dynamo.graph_break()
        return left, self.right(x)


@on_ranks(2)
def test_a_backward_that_reaches_a_part_leaves_nothing_in_flight_and_another_brings_the_rest() -> None:
    torch.manual_seed(dist.get_rank())
    model = ddp_compile(TwoBranches(), backend="aot_eager", bucket_cap_mb=1e-4)
    x = torch.randn(3, 4)
    differences = []
    for _ in range(2):
        model.zero_grad()
        left, right = model(x)
        for loss, layer in ((loss_of(right), model.right), (loss_of(left), model.left)):
            (mean,) = torch.autograd.grad(loss, layer.weight, retain_graph=True)
            dist.all_reduce(mean)
            loss.backward()
            # Each branch is averaged when its own backward returns, though the first one does not end the iteration.
            differences.append(relative_difference(layer.weight.grad, mean / dist.get_world_size()))
    assert len(differences) == 4 and max(differences) < 1e-6


@on_ranks(2)
def test_a_sparse_gradient_that_no_module_announced_is_averaged() -> None:
    torch.manual_seed(dist.get_rank())

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(20, 4))

        def forward(self, tokens: Tensor) -> Tensor:
            return nn.functional.embedding(tokens, self.table, sparse=True)

    model = ddp_compile(Lookup(), backend="aot_eager")
    tokens = torch.randint(0, 20, (6,))
    loss_of(model(tokens)).backward()
    ours = model.table.grad.clone()
    plain = model.unwrap()
    plain.zero_grad()
    loss_of(plain(tokens)).backward()
    theirs = plain.table.grad.to_dense()
    dist.all_reduce(theirs)
    assert relative_difference(ours, theirs / dist.get_world_size()) < 1e-6


@on_ranks(2)
def test_a_gradient_that_arrives_twice_is_named_with_both_causes() -> None:
    with pytest.raises(GradientArrivalError) as raised:

        class TwoHeads(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                h = self.trunk(x)
                torch._dynamo.graph_break()
                left = self.left(h)
                torch._dynamo.graph_break()
                return left, self.right(h)

        model = ddp_compile(TwoHeads(), backend="aot_eager", bucket_cap_mb=1e-5)
        left, right = model(torch.randn(2, 4))
        loss_of(left).backward(retain_graph=True)
        loss_of(right).backward()
    message = str(raised.value)
    assert "trunk.weight arrived twice" in message and "add the losses up" in message


class NotCompiled(Mlp):
    """A graph break in a loop: Dynamo gives the frame up, and so does not notice another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            torch._dynamo.graph_break()
        return x


def convert_between_two_looks_at_the_parameters(dtype: torch.dtype) -> None:
    model = ddp_compile(NotCompiled(width=8, num_layers=3), backend="eager")
    for _ in range(4):  # the next look is before the eighth forward
        loss_of(model(torch.randn(2, 8))).backward()
    model.to(dtype)
    output = model(torch.randn(2, 8, dtype=dtype))
    try:
        loss_of(output).backward()
    except ParametersChangedError as error:
        raise RuntimeError(f"in the backward: {error}") from error


@pytest.mark.parametrize("dtype", only([torch.float64], [torch.float64, torch.bfloat16]))
def test_a_dtype_that_has_changed_is_named_where_the_bucket_is_filled(dtype: torch.dtype, ranks: Ranks) -> None:
    name = str(dtype).removeprefix("torch.")
    for rank, failure in enumerate(ranks(2).run_expecting_failures(convert_between_two_looks_at_the_parameters, dtype)):
        assert failure.message.startswith(f"in the backward: rank {rank}: ")
        assert f"float32[64] before and {name}[64] now: layers.0.weight" in failure.message


@on_ranks(2)
def test_a_hook_that_clears_gradients_is_named() -> None:
    with pytest.raises(GradientArrivalError) as raised:
        model = ddp_compile(Mlp(width=8, num_layers=3), backend="aot_eager")

        def step(parameter: nn.Parameter) -> None:
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        loss_of(model(torch.randn(2, 8))).backward()
    assert "was set to None before it was averaged" in str(raised.value)
