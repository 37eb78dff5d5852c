"""Buckets launched inside the compiled backward, if that could go wrong; backwards with operators of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import Step, beside_plain, train_beside
from in_ci import only
from models import Mlp, loss_of
from rank_pool import on_ranks
from torch import Tensor, nn
from ways_to_train import count_early

from ddp_compile import ReductionError, ddp_compile
from ddp_compile.comm_hooks import allreduce_hook

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
    differences = train_beside(models, step_of, num_steps, width=WIDTH, rows=6)
    assert models[0]._ddp_compile_state.compiler.failures == []
    return differences


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Mlp(WIDTH, 3) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.parts[0](x)
        torch._dynamo.graph_break()
        return first, self.parts[1](x)


def look_at_a_part(model: Any, x: Tensor, step: int, changes: bool, everywhere: bool) -> None:
    if step == 2 and (everywhere or dist.get_rank() == 0):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient / 2 if changes else None)
    losses = [loss_of(output) for output in model(x)]
    losses[1].backward()
    model.seen_between = model.parts[1].layers[1].weight.grad.clone()
    losses[0].backward()


@pytest.mark.parametrize("changes", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("everywhere", only([False], [False, True]))
@on_ranks(2)
def test_a_part_that_has_left_is_averaged_between_backwards_and_sent_again_at_their_end(
    changes: bool, everywhere: bool
) -> None:
    seen = []

    def step(model: Any, x: Tensor, number: int) -> None:
        look_at_a_part(model, x, number, changes, everywhere)
        if hasattr(model, "no_sync"):
            seen.append(torch.equal(model.seen_between, model.parts[1].layers[1].weight.grad))

    differences = train(TwoParts, step)
    are_means_between = all(seen)
    assert max(differences) < 1e-6
    # The other ranks learn only at the end what a hook has changed.
    assert are_means_between or changes


def run_eagerly_on_rank_0(model: Any, x: Tensor, step: int) -> None:
    is_eager = step == 3 and dist.get_rank() == 0
    with torch.compiler.set_stance("force_eager" if is_eager else "default"):
        loss = loss_of(model(x))
        if step == 3 and dist.get_rank() == 1:
            loss = loss + model.layers[1].weight.square().sum()
        loss.backward()


@pytest.mark.parametrize("settings", only([{}], [{}, {"gradient_as_bucket_view": False}]))
@on_ranks(2)
def test_a_rank_whose_bucket_left_by_its_hooks_can_send_it_again(settings: dict[str, bool]) -> None:
    assert train(lambda: Mlp(WIDTH, 4), run_eagerly_on_rank_0, **settings) == [0.0] * 5


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
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient / 2)
    loss_of(model(x)).backward()


@on_ranks(2)
def test_a_rank_that_sent_zeros_can_send_them_again() -> None:
    assert max(train(Skips, skip_and_look, find_unused_parameters=True)) < 1e-6


class CompiledLate(nn.Module):
    """Nothing of it is compiled in the first iteration, in which `use_a_parameter_twice` runs it eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(WIDTH, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@on_ranks(2)
def test_graphs_compiled_later_launch_early_after_an_agreement_point() -> None:
    models = beside_plain(CompiledLate, bucket_cap_mb=CAP_MB)
    launched, num_early = count_early(models[0]), []

    def use_a_parameter_twice(model: Any, x: Tensor, step: int) -> None:
        with torch.compiler.set_stance("force_eager" if step == 0 else "default"):
            loss = loss_of(model(x))
        if step == 2:  # the bucket has been launched by then
            loss = loss + model.layers[0].layers[1].weight.square().sum()
        launched.clear()
        loss.backward()
        if model is models[0]:
            num_early.append(len(launched))

    assert train_beside(models, use_a_parameter_twice, 5, width=WIDTH, rows=6) == [0.0] * 5
    # Iterations 1, 2 and 4 are agreement points.
    assert num_early == [0, 0, 3, 2, 2]


@on_ranks(2)
def test_a_second_launch_goes_the_way_of_the_first() -> None:
    """A bucket is launched twice in an iteration in which a second contribution comes to it."""
    model = ddp_compile(Mlp(WIDTH, 3), bucket_cap_mb=CAP_MB, backend="aot_eager", split="backward")
    for step in range(3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            loss = loss_of(model(torch.randn(6, WIDTH)))
            if step == 2:
                loss = loss + model.layers[1].weight.square().sum()
            loss.backward()
        model.zero_grad()
    names = [event.name for event in profiler.events()]
    assert [names.count(f"ddp_compile::bucket_{i}_launch") for i in range(3)] == [1, 2, 1]


class Fused(nn.Module):
    """Gradients that are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        fused = nn.functional.linear(torch.tanh(self.first(x)), torch.cat(list(self.parts)))
        return self.last(torch.tanh(fused))


@on_ranks(2)
def test_gradients_that_are_views_of_one_tensor_are_launched_early() -> None:
    model = ddp_compile(Fused(), bucket_cap_mb=CAP_MB, backend="aot_eager")
    launched = count_early(model)
    loss_of(model(torch.randn(6, WIDTH))).backward()
    assert len(launched) == 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.second(torch.tanh(self.first(x))))


class SharesOneFrame(nn.Module):
    """Blocks that are compiled separately, but only once: Dynamo runs the first block's code for all others too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)  # so that every block's input needs a gradient
        self.blocks = nn.ModuleList(Block() for _ in range(4))
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


@pytest.mark.parametrize("with_hook", only([False], [False, True]))
@on_ranks(2)
def test_one_graph_of_several_modules_computes_nothing_in_another_ones_name(with_hook: bool) -> None:
    def step_of(model: Any, x: Tensor, step: int) -> None:
        if with_hook and step == 0 and hasattr(model, "register_comm_hook"):
            model.register_comm_hook(None, allreduce_hook)
        use_more_blocks(model, x, step)

    assert max(train(SharesOneFrame, step_of, find_unused_parameters=True)) < 1e-6


class KeepsLoss(nn.Module):
    """A loss that is left on the module, made by a frame that no output leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.loss = self.loss_beside(x)
        return x

    @torch.compiler.disable(recursive=False)
    def loss_beside(self, x: Tensor) -> Tensor:
        return self.frame(x)

    def frame(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ self.table) * x).tanh().square().mean()


def use_kept_loss(model: Any, x: Tensor, step: int) -> None:
    (loss_of(model(x)) + model.loss).backward()


@on_ranks(2)
def test_a_bucket_that_no_output_leads_to_is_not_sent_without_what_is_computed() -> None:
    assert max(train(KeepsLoss, use_kept_loss, find_unused_parameters=True)) < 1e-6


def register_hook_and_accumulate(model: Any, x: Tensor, step: int) -> None:
    if step == 2 and hasattr(model, "register_comm_hook"):
        model.register_comm_hook(None, allreduce_hook)
    with getattr(model, "no_sync", contextlib.nullcontext)():
        loss_of(model(2 * x)).backward()
    loss_of(model(x)).backward()


def test_a_single_rank_that_begins_to_send_later_keeps_what_was_accumulated(single_rank_group: None) -> None:
    assert train(lambda: Mlp(WIDTH, 4), register_hook_and_accumulate) == [0.0] * 5


# Backwards with operators of their own.

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


def look_on_rank_0(model: Any, x: Tensor, step: int) -> None:
    if step == 2 and dist.get_rank() == 0:
        list(model.parameters())[-1].register_hook(lambda gradient: None)
    loss_of(model(x)).backward()


def evaluate_on_rank_0(model: Any, x: Tensor, step: int) -> None:
    if step >= 2 and dist.get_rank() == 0:
        model.eval()
        model(x)
        model.train()
    loss_of(model(x)).backward()


@pytest.mark.parametrize(
    ("step_of", "comm_hook", "settings"),
    [
        pytest.param(look_on_rank_0, False, {}, marks=pytest.mark.long),
        pytest.param(look_on_rank_0, True, {}, marks=pytest.mark.long),
        pytest.param(look_on_rank_0, False, {"static_graph": True}, marks=pytest.mark.long),
        (evaluate_on_rank_0, False, {}),
    ],
)
@on_ranks(2)
def test_collectives_of_the_backward_itself_meet_those_of_other_ranks(
    step_of: Step, comm_hook: bool, settings: dict[str, bool]
) -> None:
    def step(model: Any, x: Tensor, number: int) -> None:
        if comm_hook and number == 0 and hasattr(model, "register_comm_hook"):
            model.register_comm_hook(None, allreduce_hook)
        step_of(model, x, number)

    assert train(lambda: WithCollective(WIDTH, 4), step, **settings) == [0.0] * 5


class RaisesOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.ops.ddp_compile_tests.raise_if_asked(gradient)


asked_to_raise = False


def raise_if_asked(x: Tensor) -> Tensor:
    if asked_to_raise:
        raise ValueError("user error")
    return x.clone()


LIBRARY.define("raise_if_asked(Tensor x) -> Tensor")
LIBRARY.impl("raise_if_asked", raise_if_asked, "CompositeExplicitAutograd")
torch.library.register_fake("ddp_compile_tests::raise_if_asked", torch.empty_like, lib=LIBRARY)


class MayRaise(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 1:
                x = RaisesOnce.apply(x)
        return x


@on_ranks(2)
def test_after_an_exception_past_the_first_launch_the_next_forward_is_refused() -> None:
    global asked_to_raise
    model = ddp_compile(MayRaise(WIDTH, 4), bucket_cap_mb=CAP_MB, backend="aot_eager")
    x = torch.ones(6, WIDTH)
    with model.no_sync():
        loss_of(model(x)).backward()
    loss = loss_of(model(x))
    asked_to_raise = True
    with pytest.raises(ValueError, match="user error"):
        loss.backward()
    asked_to_raise = False
    with pytest.raises(ReductionError, match="the last backward raised after its reduction had started"):
        model(x)
