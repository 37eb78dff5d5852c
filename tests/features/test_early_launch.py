"""Buckets launched inside the compiled backward: launched again if that was too early, or an error where it cannot be.

`test_ways_to_train` has the ways to train in which that happens. The backwards here have something in their way.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import Step, beside_plain, own_batch, pair, train_beside
from models import Mlp, largest, loss_of
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from ways_to_train import APPEARS_AT, WAYS, count_early

from ddp_compile import GradientArrivalError, ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

WIDTH = 33
CAP_MB = 0.003  # less than a layer


@pytest.fixture(scope="module")
def split() -> str:
    """Under "forward" no bucket is launched before all its gradients have been accumulated."""
    return "backward"


def train(make: Callable[[], nn.Module], step_of: Step, num_steps: int = 5, **settings: Any) -> list[float]:
    """For each step the largest relative difference of a gradient to the mean of the plain module's."""
    models = beside_plain(make, bucket_cap_mb=CAP_MB, **settings)
    return train_beside(models, step_of, num_steps, width=WIDTH, rows=6)


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Mlp(WIDTH, 3) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.parts[0](x)
        torch._dynamo.graph_break()
        return first, self.parts[1](x)


def halve_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / 2)


def backward_by_parts(model: Any, x: Tensor, step: int) -> None:
    if step == 2 and dist.get_rank() == 0:
        halve_gradients(model)
    losses = [loss_of(output) for output in model(x)]
    losses[1].backward()
    losses[0].backward()


@on_ranks(2)
def test_part_that_was_exposed() -> None:
    """Between the backwards its means are visible. At their end it is launched again."""
    assert max(train(TwoParts, backward_by_parts)) < 1e-6


class Skips(nn.Module):
    """A branch that rank 1 leaves out, in separate frames."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.head = (Mlp(WIDTH, 2) for _ in range(3))
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        torch._dynamo.graph_break()
        if not self.skips:
            x = self.branch(x)
        torch._dynamo.graph_break()
        return self.head(x)


def skip_and_look(model: Any, x: Tensor, step: int) -> None:
    model.skips = step >= 2 and dist.get_rank() == 1
    if step == 3:
        halve_gradients(model)
    loss_of(model(x)).backward()


@on_ranks(2)
def test_zeros_sent_again() -> None:
    assert max(train(Skips, skip_and_look, find_unused_parameters=True)) < 1e-6


class Block(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class SharesOneFrame(nn.Module):
    """Blocks that are compiled separately, but only once: Dynamo runs the first block's code for all others too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)  # so that every block's input needs a gradient
        self.blocks = nn.ModuleList(Block(WIDTH, 2) for _ in range(4))
        self.used = [0]

    @torch.compiler.disable(recursive=False)
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i in self.used:
            x = self.blocks[i](x)
        return x


def use_more_blocks(model: Any, x: Tensor, step: int) -> None:
    model.used = [0] if step < 2 else [1, 2, 3] if dist.get_rank() == 1 else [0, 1, 2, 3]
    loss_of(model(x)).backward()


@on_ranks(2)
def test_one_graph_of_several_modules() -> None:
    """It hands over the buckets of the module that it runs for, and of no other one."""
    assert max(train(SharesOneFrame, use_more_blocks, find_unused_parameters=True)) < 1e-6


LIBRARY = torch.library.Library("ddp_compile_tests", "FRAGMENT")


class AllReducesInBackward(torch.autograd.Function):
    """Stands for layers that communicate over the group of the gradients, as a synchronized BatchNorm does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.ops.ddp_compile_tests.all_reduce(gradient)


def all_reduced(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


LIBRARY.define("all_reduce(Tensor x) -> Tensor")
LIBRARY.impl("all_reduce", all_reduced, "CompositeExplicitAutograd")
torch.library.register_fake("ddp_compile_tests::all_reduce", torch.empty_like, lib=LIBRARY)


class WithCollective(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 1:
                x = AllReducesInBackward.apply(x)
        return x


def differ_on_rank_0(model: Any, x: Tensor, step: int) -> None:
    """It evaluates before it trains, and a hook looks at a gradient."""
    if step >= 2 and dist.get_rank() == 0:
        model.eval()
        model(x)
        model.train()
        if step == 3:
            list(model.parameters())[-1].register_hook(lambda gradient: None)
    loss_of(model(x)).backward()


@on_ranks(2)
def test_collectives_in_the_backward() -> None:
    assert train(lambda: WithCollective(WIDTH, 4), differ_on_rank_0) == [0.0] * 5


# Algorithms and settings with which a bucket cannot be launched twice.


def mlp() -> nn.Module:
    return Mlp(WIDTH, 4)


def averages_and_counts(num_calls: dict[int, int], bucket: Any) -> torch.futures.Future[Tensor]:
    """A hook with a state, which the second call for a bucket in one step would change again."""
    num_calls[bucket.index()] = num_calls.get(bucket.index(), 0) + 1
    return allreduce_hook(None, bucket)


@on_ranks(2)
def test_comm_hook_with_a_state() -> None:
    models = pair(mlp, bucket_cap_mb=CAP_MB, split="backward")
    num_calls: dict[int, int] = {}
    models[0].register_comm_hook(num_calls, averages_and_counts)
    step_of = WAYS["contributor_that_appears_on_one_rank"].step
    assert largest(train_beside(models, step_of, APPEARS_AT + 1, width=WIDTH)) == 0.0
    assert num_calls == dict.fromkeys(range(4), APPEARS_AT + 1)
    assert "the comm hook averages_and_counts must not be called twice for a bucket" in str(models[0].explain())


@on_ranks(2)
def test_comm_hook_without_a_state() -> None:
    models = pair(mlp, bucket_cap_mb=CAP_MB, split="backward")
    models[0].register_comm_hook(None, allreduce_hook)
    launched = count_early(models[0])
    step_of = WAYS["tensor_hook_on_data_on_one_rank"].step
    assert largest(train_beside(models, step_of, APPEARS_AT + 1, width=WIDTH)) == 0.0
    assert len(launched) == 3 * (APPEARS_AT + 1)


@on_ranks(2)
def test_static_graph_with_another_contributor() -> None:
    step_of = WAYS["contributor_that_appears_on_one_rank"].step
    model = ddp_compile(mlp(), bucket_cap_mb=CAP_MB, backend="aot_eager", split="backward", static_graph=True)
    for step in range(APPEARS_AT):
        step_of(model, own_batch(0, WIDTH, 6), step)
        model.zero_grad()
    with pytest.raises(GradientArrivalError) as raised:
        step_of(model, own_batch(0, WIDTH, 6), APPEARS_AT)
    text = str(raised.value)
    assert text.startswith(f"rank {dist.get_rank()}: layers.1.weight got another gradient, on this rank or another one")
    assert "static_graph=True, which promises that all iterations are alike" in text


@pytest.mark.inductor
@on_ranks(2)
def test_places_that_are_not_aligned() -> None:
    """With a comm hook places have no gaps, so some are not aligned, but compiled code expects aligned ones."""
    # Products alone, which take no C++ kernels, of a number of elements that leaves the next place unaligned.
    settings: Any = {"bucket_cap_mb": 0.009, "split": "backward", "backend": "inductor", "static_graph": True}
    models = pair(lambda: nn.Sequential(*(nn.Linear(33, 33, bias=False) for _ in range(4))), **settings)
    models[0].register_comm_hook(None, allreduce_hook)
    launched = count_early(models[0])
    assert largest(train_beside(models, num_steps=4, width=33)) < 1e-5
    assert len(launched) == 3 * (len(models[0].bucket_plan.buckets) - 1)  # none in the first step


@pytest.mark.inductor
@on_ranks(2)
def test_launches_between_products() -> None:
    torch.manual_seed(3)
    layers = [nn.Linear(257, 257, bias=False) for _ in range(8)]  # products alone: no C++ for inductor to compile
    model = ddp_compile(nn.Sequential(*layers), bucket_cap_mb=0.25, split="backward", backend="inductor")
    x = torch.randn(6, 257)
    for _ in range(2):
        model.zero_grad()
        loss_of(model(x)).backward()
    model.zero_grad()
    loss = loss_of(model(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    events: Any = profile.events()
    launches = [event.time_range.start for event in events if event.name.endswith("_launch")]
    products = [event.time_range.start for event in events if event.name == "aten::mm"]
    # Two products for each layer but the first one, whose bucket is launched when the backward ends.
    assert len(launches) == 8 and len(products) == 15
    for i, start in enumerate(sorted(launches)[:7]):
        assert sum(product > start for product in products) >= 15 - 2 * (i + 1)
