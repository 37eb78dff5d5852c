"""Buckets that leave inside the compiled backward: exact in every way to train, and early where that is safe."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from models import Mlp, loss_of, relative_difference
from rank_pool import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_compile import ddp_compile
from ddp_compile.comm_hooks import allreduce_hook
from ddp_compile.errors import GradientArrivalError

Ranks = Callable[[int], RankPool]
Step = Callable[[nn.Module, Tensor, int], None]
NUM_STEPS = 5
APPEARS_AT = 3


class Trained(NamedTuple):
    """What training five steps has shown.

    Args:
        worst: Largest relative difference of any gradient to the reference, bit for bit equal if 0.
        num_early: How many buckets left inside the backward, for each step.
    """

    worst: float
    num_early: tuple[int, ...]


def inner_weight(model: nn.Module) -> Tensor:
    """Of the second layer: the bucket of the first one is ready when the backward ends, and never leaves inside it."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    return weights[min(1, len(weights) - 1)]


def penalty(model: nn.Module) -> Tensor:
    return 0.1 * inner_weight(model).square().sum()


def plain(model: nn.Module, x: Tensor, step: int) -> None:
    loss_of(model(x)).backward()


def regulariser_built_after(model: nn.Module, x: Tensor, step: int) -> None:
    (loss_of(model(x)) + penalty(model)).backward()


def regulariser_built_before(model: nn.Module, x: Tensor, step: int) -> None:
    extra = penalty(model)
    (extra + loss_of(model(x))).backward()


def two_forwards(model: nn.Module, x: Tensor, step: int) -> None:
    (loss_of(model(x)) + loss_of(model(2 * x))).backward()


def two_forwards_later(model: nn.Module, x: Tensor, step: int) -> None:
    (two_forwards if step >= APPEARS_AT else plain)(model, x, step)


def contributor_on_one_rank(model: nn.Module, x: Tensor, step: int) -> None:
    (regulariser_built_after if dist.get_rank() == 1 else plain)(model, x, step)


def contributor_that_appears(model: nn.Module, x: Tensor, step: int) -> None:
    (regulariser_built_before if step >= APPEARS_AT else plain)(model, x, step)


def contributor_that_appears_on_one_rank(model: nn.Module, x: Tensor, step: int) -> None:
    (contributor_that_appears if dist.get_rank() == 1 else plain)(model, x, step)


def accumulate(model: nn.Module, x: Tensor, step: int) -> None:
    for scale in (1.0, 2.0, 3.0):
        loss_of(model(scale * x)).backward()


def accumulate_in_no_sync(model: nn.Module, x: Tensor, step: int) -> None:
    for scale in (1.0, 2.0, 3.0):
        with model.no_sync() if scale < 3 else contextlib.nullcontext():
            loss_of(model(scale * x)).backward()


def accumulate_and_regularise(model: nn.Module, x: Tensor, step: int) -> None:
    with model.no_sync():
        loss_of(model(2 * x)).backward()
    contributor_that_appears(model, x, step)


def average_and_regularise(model: nn.Module, x: Tensor, step: int) -> None:
    loss_of(model(2 * x)).backward()
    contributor_that_appears(model, x, step)


def forward_that_nobody_uses(model: nn.Module, x: Tensor, step: int) -> None:
    model(3 * x)
    loss_of(model(x)).backward()


def forward_in_no_sync_that_nobody_uses(model: nn.Module, x: Tensor, step: int) -> None:
    with model.no_sync():
        model(3 * x)
    loss_of(model(x)).backward()


def halve(gradient: Tensor) -> Tensor:
    return gradient / 2


def halve_in_place(gradient: Tensor) -> None:
    gradient.div_(2)


def tensor_hook(model: nn.Module, x: Tensor, step: int) -> None:
    if step == APPEARS_AT:
        inner_weight(model).register_hook(halve)
    plain(model, x, step)


def tensor_hook_in_place(model: nn.Module, x: Tensor, step: int) -> None:
    if step == APPEARS_AT:
        inner_weight(model).register_hook(halve_in_place)
    plain(model, x, step)


def halve_stored(parameter: Tensor) -> None:
    parameter.grad.div_(2)


def hook_after_accumulation(model: nn.Module, x: Tensor, step: int) -> None:
    if step == APPEARS_AT:
        inner_weight(model).register_post_accumulate_grad_hook(halve_stored)
    plain(model, x, step)


def graph_kept(model: nn.Module, x: Tensor, step: int) -> None:
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward()


def gradients_asked_for(model: nn.Module, x: Tensor, step: int) -> None:
    loss = loss_of(model(x))
    torch.autograd.grad(loss, inner_weight(model), retain_graph=True)
    loss.backward()


def gradients_asked_for_later(model: nn.Module, x: Tensor, step: int) -> None:
    (gradients_asked_for if step >= APPEARS_AT else plain)(model, x, step)


def losses_one_by_one(model: nn.Module, x: Tensor, step: int) -> None:
    early, late = model(x)
    loss_of(early).backward(retain_graph=True)
    loss_of(late).backward()


class TwoOutputs(Mlp):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        early = torch.tanh(self.layers[0](x))
        x = early
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return early, x


class UsedTwice(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.layers[0](super().forward(x))))


class FrameUsedTwice(Mlp):
    """One compiled frame that the model calls twice, so that its graph offers each bucket twice in a backward."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        x = self.body(x)
        torch._dynamo.graph_break()
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class Tied(Mlp):
    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__(width, num_layers)
        self.layers[-1].weight = self.layers[0].weight


class Shared(nn.Module):
    """One gradient for two parameters, and the tangent itself as a third one's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right, self.last = (nn.Parameter(torch.randn(6, width)) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x + self.left + self.right) @ self.weight) + self.last


class Convolutions(nn.Module):
    """Inductor computes their gradients in channels_last, whatever the parameters' strides are."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(fan_in, 16, 3, padding=1) for fan_in in (1, 16, 16, 16))
        self.to(memory_format=memory_format)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :32].view(-1, 1, 4, 8)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Pattern(NamedTuple):
    """A way to train.

    Args:
        step: One step.
        num_early: How many of the four buckets leave inside the backward in each step, without the last one, which is
            ready when it ends; more where there are several backwards in one.
        make: Makes the model.
        is_ddps: Whether DistributedDataParallel can do it; otherwise the plain model's mean is the reference.
    """

    step: Step
    num_early: tuple[int, ...] = (0, 3, 3, 3, 3)
    make: Callable[[], nn.Module] = lambda: Mlp(33, 4)
    is_ddps: bool = True


NEVER = (0, 0, 0, 0, 0)
# The regularised weight's bucket waits for its hooks, the others do not.
BUT_ONE = (0, 2, 2, 2, 2)
# What leaves too early is sent again, and waits from then on.
UNTIL_IT_APPEARS = (0, 3, 3, 3, 2)
PATTERNS = {
    "plain": Pattern(plain),
    "regulariser_built_after": Pattern(regulariser_built_after, BUT_ONE),
    "regulariser_built_before": Pattern(regulariser_built_before, BUT_ONE),
    "two_forwards": Pattern(two_forwards, NEVER),
    "two_forwards_later": Pattern(two_forwards_later, (0, 3, 3, 0, 0)),
    "contributor_on_one_rank": Pattern(contributor_on_one_rank, BUT_ONE),
    "contributor_that_appears": Pattern(contributor_that_appears, UNTIL_IT_APPEARS),
    "contributor_that_appears_on_one_rank": Pattern(contributor_that_appears_on_one_rank, UNTIL_IT_APPEARS),
    "accumulate": Pattern(accumulate, (6, 9, 9, 9, 9)),
    "accumulate_in_no_sync": Pattern(accumulate_in_no_sync),
    "accumulate_and_regularise": Pattern(accumulate_and_regularise, UNTIL_IT_APPEARS),
    "average_and_regularise": Pattern(average_and_regularise, (3, 6, 6, 6, 4)),
    "forward_that_nobody_uses": Pattern(forward_that_nobody_uses, NEVER),
    "tensor_hook": Pattern(tensor_hook, (0, 3, 3, 2, 2)),
    "tensor_hook_in_place": Pattern(tensor_hook_in_place, (0, 3, 3, 2, 2)),
    "hook_after_accumulation": Pattern(hook_after_accumulation, (0, 3, 3, 2, 2)),
    "graph_kept": Pattern(graph_kept, is_ddps=False),
    # The graph runs twice, and neither time is it known to be the last.
    "gradients_asked_for": Pattern(gradients_asked_for, NEVER, is_ddps=False),
    "gradients_asked_for_later": Pattern(gradients_asked_for_later, (0, 3, 3, 0, 0), is_ddps=False),
    "losses_one_by_one": Pattern(losses_one_by_one, make=lambda: TwoOutputs(33, 4), is_ddps=False),
    "module_used_twice": Pattern(plain, make=lambda: UsedTwice(33, 4)),
    "frame_used_twice": Pattern(plain, NEVER, make=lambda: FrameUsedTwice(33, 4)),
    "tied_weights": Pattern(plain, BUT_ONE, make=lambda: Tied(33, 4)),
    "shared_gradients": Pattern(plain, (0, 1, 1, 1, 1), make=lambda: Shared(33)),
    "convolutions": Pattern(plain, make=lambda: Convolutions(torch.contiguous_format)),
    "channels_last": Pattern(plain, make=lambda: Convolutions(torch.channels_last)),
}


def count_early(model: nn.Module) -> list[int]:
    """A list to which the number of each bucket is appended that leaves inside a backward."""
    early = model._ddp_compile_state.reducer._early
    left, contributions = [], early.contributions

    def counted(bucket: Any, moved: Any) -> list[Tensor]:
        left.append(bucket.spec.index)
        return contributions(bucket, moved)

    early.contributions = counted
    return left


def train(pattern: str, backend: str, **settings: Any) -> Trained:
    step_of, _, make, is_ddps = PATTERNS[pattern]
    torch.manual_seed(3)
    reference = make()
    torch.manual_seed(3)
    model = ddp_compile(make(), bucket_cap_mb=0.003, split="backward", backend=backend, **settings)
    if is_ddps:
        reference = DistributedDataParallel(reference)
    left, num_early, worst = count_early(model), [], 0.0
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(NUM_STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(6, 33)
        left.clear()
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            with torch._functorch.config.patch(donated_buffer=False):
                step_of(each, x, step)
        num_early.append(len(left))
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            if not is_ddps:
                dist.all_reduce(q.grad)
                q.grad /= dist.get_world_size()
            worst = max(worst, relative_difference(p.grad, q.grad))
        for optimizer in optimizers:
            optimizer.step()
    assert model._ddp_compile_state.compiler.failures == []
    return Trained(worst, tuple(num_early))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_are_exact_and_buckets_leave_early(pattern: str, ranks: Ranks) -> None:
    for trained in ranks(2).run(train, pattern, "aot_eager"):
        # A sum of the round before and of this one rounds otherwise than the sum of both.
        assert trained.worst <= (0.0 if PATTERNS[pattern].is_ddps else 1e-6)
        assert trained.num_early == PATTERNS[pattern].num_early


@pytest.mark.parametrize(
    ("pattern", "setting"),
    [
        ("accumulate_in_no_sync", {"find_unused_parameters": True}),
        ("contributor_that_appears_on_one_rank", {"find_unused_parameters": True}),
        ("plain", {"static_graph": True}),
        ("accumulate", {"static_graph": True}),
        ("accumulate_in_no_sync", {"static_graph": True}),
        ("shared_gradients", {"static_graph": True}),
        ("plain", {"static_graph": True, "gradient_as_bucket_view": False}),
        ("accumulate", {"gradient_as_bucket_view": False}),
        ("contributor_that_appears", {"gradient_as_bucket_view": False}),
    ],
)
def test_gradients_are_exact_with_every_setting(pattern: str, setting: dict[str, bool], ranks: Ranks) -> None:
    for trained in ranks(2).run(train, pattern, "aot_eager", **setting):
        assert trained == Trained(0.0, PATTERNS[pattern].num_early)


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("pattern", "static_graph"),
    [
        ("plain", False),
        ("plain", True),
        ("contributor_that_appears_on_one_rank", False),
        ("shared_gradients", False),
        ("shared_gradients", True),
        ("convolutions", False),
        ("channels_last", False),
        ("channels_last", True),
    ],
)
def test_gradients_are_exact_under_inductor(pattern: str, static_graph: bool, ranks: Ranks) -> None:
    for trained in ranks(2).run(train, pattern, "inductor", static_graph=static_graph):
        assert trained.worst < 1e-5
        assert trained.num_early == PATTERNS[pattern].num_early


def late_and_not_repeatable(because: str) -> tuple[str, float]:
    """The error, and how far the gradients are off when the step is done again."""
    torch.manual_seed(3)
    reference = DistributedDataParallel(Mlp(33, 4))
    model = ddp_compile(Mlp(33, 4), bucket_cap_mb=0.003, split="backward", backend="aot_eager")
    model.load_state_dict(reference.state_dict())
    if because == "comm_hook":
        model.register_comm_hook(None, allreduce_hook)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(6, 33)
    for _ in range(2):
        model.zero_grad()
        loss_of(model(x)).backward()
    said = ""
    for attempt in range(2):
        model.zero_grad()
        step = contributor_on_one_rank
        if because == "rank_0_waits_for_hooks" and dist.get_rank() == 0 and attempt == 0:
            step = forward_in_no_sync_that_nobody_uses  # outside, it would be one that the ranks miss
        try:
            step(model, x, attempt)
        except GradientArrivalError as error:
            assert attempt == 0
            said = str(error)
    contributor_on_one_rank(reference, x, 0)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return said, max(relative_difference(p.grad, q.grad) for p, q in pairs)


@pytest.mark.parametrize("because", ["comm_hook", "rank_0_waits_for_hooks"])
def test_a_late_contributor_is_an_error_on_every_rank_where_the_bucket_cannot_be_sent_again(
    because: str, ranks: Ranks
) -> None:
    for rank, (said, difference) in enumerate(ranks(2).run(late_and_not_repeatable, because)):
        assert said.startswith(f"rank {rank}: layers.1.weight got another gradient, on this rank or another one")
        assert ("comm hook must not" in said) == (because == "comm_hook")
        assert difference == 0.0


def one_step(cap_mb: float, checkpointed: bool) -> tuple[list[int], int, int, float]:
    """Buckets that left early in the second step, in order; how many graphs and buckets there are; the difference."""
    torch.manual_seed(3)
    make = (lambda: Checkpointed(257, 8)) if checkpointed else (lambda: Mlp(257, 8))
    reference = DistributedDataParallel(make())
    model = ddp_compile(make(), bucket_cap_mb=cap_mb, split="backward", backend="aot_eager")
    model.load_state_dict(reference.module.state_dict())
    torch.manual_seed(dist.get_rank())
    x = torch.randn(6, 257)
    left = count_early(model)
    for each in (model, reference):
        for _ in range(2):
            left.clear()
            each.zero_grad()
            loss_of(each(x)).backward()
        if each is model:
            early = list(left)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    worst = max(relative_difference(p.grad, q.grad) for p, q in pairs)
    return early, len(model._ddp_compile_state.backend.reports), len(model.bucket_plan.buckets), worst


def train_with_hook(backend: str) -> tuple[float, list[int]]:
    """With a comm hook places have no gaps, so that some are not aligned, and compiled code expects that they are."""
    torch.manual_seed(3)
    reference = DistributedDataParallel(Mlp(33, 4))
    model = ddp_compile(
        copy.deepcopy(reference.module), bucket_cap_mb=0.006, split="backward", backend=backend, static_graph=True
    )
    model.register_comm_hook(None, allreduce_hook)
    left = count_early(model)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(6, 33)
    for _ in range(3):
        left.clear()
        for each in (model, reference):
            each.zero_grad()
            loss_of(each(x)).backward()
    assert model._ddp_compile_state.compiler.failures == []
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(relative_difference(p.grad, q.grad) for p, q in pairs), left


@pytest.mark.inductor
def test_gradients_whose_places_are_not_aligned_wait_for_their_hooks(ranks: Ranks) -> None:
    for worst, left in ranks(2).run(train_with_hook, "inductor"):
        assert worst < 1e-5
        assert left == []


def broken_promise() -> str:
    model = ddp_compile(Mlp(33, 4), bucket_cap_mb=0.003, split="backward", backend="aot_eager", static_graph=True)
    for step in range(APPEARS_AT + 1):
        model.zero_grad()
        try:
            contributor_that_appears_on_one_rank(model, torch.ones(6, 33), step)
        except GradientArrivalError as error:
            assert step == APPEARS_AT
            return str(error)
    return ""


def test_a_contributor_that_a_static_graph_had_not_is_an_error_on_every_rank(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks(2).run(broken_promise)):
        assert said.startswith(f"rank {rank}: layers.1.weight got another gradient, on this rank or another one")
        assert "static_graph=True, which promises that every iteration is like the first" in said


class Checkpointed(Mlp):
    """The whole model in one checkpoint, which is one node of the forward graph and flat in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize(("cap_mb", "checkpointed"), [(0.25, False), (1, False), (5, False), (25, False), (0.25, True)])
def test_every_bucket_but_the_last_leaves_inside_one_backward_whatever_the_capacity(
    cap_mb: float, checkpointed: bool, ranks: Ranks
) -> None:
    for early, num_graphs, num_buckets, worst in ranks(2).run(one_step, cap_mb, checkpointed):
        assert early == list(range(num_buckets - 1))
        assert num_buckets == {0.25: 8, 1: 2, 5: 2, 25: 2}[cap_mb]
        assert num_graphs == 1
        assert worst == 0.0


def starts_in_a_step(backend: str) -> tuple[list[float], list[float]]:
    """Microseconds at which buckets were launched and matrix products begun, in one backward after the learning one."""
    torch.manual_seed(3)
    model = ddp_compile(Mlp(257, 8), bucket_cap_mb=0.25, split="backward", backend=backend)
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
    return launches, [event.time_range.start for event in events if event.name == "aten::mm"]


@pytest.mark.inductor
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_buckets_leave_while_the_rest_is_computed(backend: str, ranks: Ranks) -> None:
    for launches, products in ranks(2).run(starts_in_a_step, backend):
        # Two products for each layer but the first one, whose bucket leaves when the backward ends.
        assert len(launches) == 8 and len(products) == 15
        for i, start in enumerate(sorted(launches)[:7]):
            assert sum(product > start for product in products) >= 15 - 2 * (i + 1)
