"""``static_graph``: what the first iteration teaches, against eager DistributedDataParallel."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import relative_difference
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

Ranks = Callable[[int], RankPool]
WIDTH = 13


class SharedUnderCheckpoints(nn.Module):
    """One layer under several checkpoints, a layer of its own, and one that nobody uses."""

    def __init__(self, use_reentrant: bool, times: int = 3) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.use_reentrant = use_reentrant
        self.times = times
        self.uses_spare = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.repeat(self.own(x))
        return self.spare(x) if self.uses_spare else x

    # In a graph, all checkpoints over one weight would be one backward.
    @torch.compiler.disable
    def repeat(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = checkpoint(lambda t: torch.tanh(self.shared(t)), x, use_reentrant=self.use_reentrant)
        return x


def pair(use_reentrant: bool, as_view: bool = True, **options: object) -> tuple[nn.Module, nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(SharedUnderCheckpoints(use_reentrant))
    ours = ddp_compile(
        models[0],
        bucket_cap_mb=0.0005,
        backend="aot_eager",
        static_graph=True,
        gradient_as_bucket_view=as_view,
        **options,
    )
    theirs = DistributedDataParallel(
        models[1], bucket_cap_mb=0.0005, static_graph=True, gradient_as_bucket_view=as_view
    )
    return ours, theirs


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("as_view", only([True], [True, False]))
@on_ranks(2)
def test_checkpoints_over_one_weight_and_parameters_that_nobody_uses(use_reentrant: bool, as_view: bool) -> None:
    ours, theirs = pair(use_reentrant, as_view)
    torch.manual_seed(100 + dist.get_rank())
    worst = 0.0
    arrivals = []
    ours.shared.weight.register_post_accumulate_grad_hook(lambda _: arrivals.append(1))
    for _ in range(4):
        x = torch.randn(4, WIDTH)
        for model in (ours, theirs):
            for _ in range(1):
                model(x).square().sum().backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            if q.grad is not None and q.grad.count_nonzero():
                worst = max(worst, relative_difference(p.grad, q.grad))
        for model in (ours, theirs):
            model.zero_grad(set_to_none=True)
    unused = [p.grad is None for p in ours.spare.parameters()]
    assert worst < 1e-6
    assert unused == [True, True]
    # The case is there: a reentrant checkpoint brings the weight's gradient once for each of its uses.
    assert len(arrivals) == 4 * (3 if use_reentrant else 1)


@pytest.mark.parametrize("use_reentrant", only([True], [True, False]))
@on_ranks(2)
def test_a_checkpoint_around_the_whole_module(use_reentrant: bool) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
    ours = ddp_compile(models[0], bucket_cap_mb=0.0005, backend="aot_eager", static_graph=True)
    theirs = DistributedDataParallel(models[1], static_graph=True)
    torch.manual_seed(100 + dist.get_rank())
    worst = 0.0
    for _ in range(4):
        x = torch.randn(4, WIDTH, requires_grad=True)
        for model in (ours, theirs):
            model.zero_grad()
            checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        worst = max(worst, *(relative_difference(p.grad, q.grad) for p, q in pairs))
    assert worst < 1e-6


class Checkpoints(nn.Sequential):
    """Nothing but reentrant checkpoints: the pass in which the output is differentiated brings no gradient itself."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            torch._dynamo.graph_break()
            x = checkpoint(layer, x, use_reentrant=True)
        return x


@on_ranks(2)
def test_nothing_but_reentrant_checkpoints() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(Checkpoints(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
    ours = ddp_compile(models[0], bucket_cap_mb=0.0005, backend="aot_eager", static_graph=True)
    theirs = DistributedDataParallel(models[1], static_graph=True)
    torch.manual_seed(100 + dist.get_rank())
    worst = []
    for _ in range(3):
        x = torch.randn(4, WIDTH, requires_grad=True)
        for model in (ours, theirs):
            model.zero_grad()
            model(x).square().sum().backward()
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        worst.append(max(relative_difference(p.grad, q.grad) for p, q in pairs))
    assert max(worst) < 1e-6, worst


@on_ranks(2)
def test_a_parameter_that_only_the_loss_uses() -> None:
    """A parameter that the forward does not use, but the loss does, in every iteration."""
    ours, _ = pair(use_reentrant=False)
    worst = 0.0
    for _ in range(3):
        ours.zero_grad(set_to_none=True)
        x = torch.full((4, WIDTH), 1.0 + dist.get_rank())
        (ours(x).sum() + (1 + dist.get_rank()) * ours.spare.weight.square().sum()).backward()
        worst = max(worst, relative_difference(ours.spare.weight.grad, 3 * ours.spare.weight.detach()))
    assert worst < 1e-6


def broken_promise(first: bool, second: bool) -> None:
    ours, _ = pair(use_reentrant=False)
    x = torch.ones(4, WIDTH)
    for uses_spare in (first, second):
        ours.uses_spare = uses_spare
        ours(x).sum().backward()
    ours(x)


@pytest.mark.parametrize(
    ("first", "second", "kind", "message"),
    [
        (False, True, "GradientArrivalError", "spare.* got a gradient after .*static_graph=True promises that this"),
        (True, False, "MissingGradientError", "2 of 6 parameters got no gradient .*spare.*static_graph=True the param"),
    ],
)
def test_a_broken_promise_is_named(ranks: Ranks, first: bool, second: bool, kind: str, message: str) -> None:
    for failure in ranks(2).run_expecting_failures(broken_promise, first, second):
        assert failure.kind == kind
        assert re.search(message, failure.message)


def test_it_makes_find_unused_parameters_pointless(single_rank_group: None) -> None:
    with pytest.warns(UserWarning, match="find_unused_parameters=True has no effect with static_graph=True"):
        ddp_compile(nn.Linear(2, 2), static_graph=True, find_unused_parameters=True, backend="eager")
