"""``find_unused_parameters`` against eager DistributedDataParallel: who used what, on which rank, and when."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import assert_buckets_launched_early, relative_difference
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

Ranks = Callable[[int], RankPool]
WIDTH = 17


@dataclass
class Outputs:
    hidden: Tensor
    more: dict[str, list[Tensor]]


class Branches(nn.Module):
    """A trunk, one of several branches, and a head; which branch is an attribute."""

    def __init__(self, returns: str = "tensor") -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.branch = 0
        self.returns = returns

    def forward(self, x: Tensor) -> Any:
        x = self.trunk(x)
        x = self.branches[self.branch](x)
        y = self.head(x)
        if self.returns == "dict":
            return {"unused": None, "losses": [y, (x,)]}
        if self.returns == "dataclass":
            return Outputs(x, {"y": [y]})
        return y


def result_of(outputs: Any) -> Tensor:
    if isinstance(outputs, dict):
        return outputs["losses"][0]
    return outputs.more["y"][0] if isinstance(outputs, Outputs) else outputs


def pair(returns: str = "tensor", as_view: bool = True, backend: str = "aot_eager") -> tuple[nn.Module, nn.Module]:
    """Ours and DistributedDataParallel's, with equal parameters and several buckets."""
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(Branches(returns))
    ours = ddp_compile(
        models[0],
        bucket_cap_mb=0.001,
        backend=backend,
        find_unused_parameters=True,
        gradient_as_bucket_view=as_view,
    )
    theirs = DistributedDataParallel(
        models[1], bucket_cap_mb=0.001, find_unused_parameters=True, gradient_as_bucket_view=as_view
    )
    return ours, theirs


def choose(branch: int, *models: nn.Module) -> None:
    for model in models:
        getattr(model, "module", model).branch = branch


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Largest relative difference of two gradients; infinite where only one model has one."""
    worst = 0.0
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        if (p.grad is None) != (q.grad is None):
            return float("inf")
        if p.grad is not None and q.grad is not None:
            worst = max(worst, relative_difference(p.grad, q.grad))
    return worst


def branch_by_rank_and_step(returns: str, as_view: bool, set_to_none: bool, backend: str) -> tuple[float, list[bool]]:
    """Branches 0 and 1 by rank, then both ranks the same, then a branch that only one rank ever uses."""
    ours, theirs = pair(returns, as_view, backend)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    torch.manual_seed(100 + dist.get_rank())
    worst = 0.0
    for step in range(6):
        rank = dist.get_rank()
        choose([rank % 2, 0, 1, 2 if rank == 0 else 1, 1 - rank % 2, 0][step], ours, theirs)
        x = torch.randn(4, WIDTH)
        for model in (ours, theirs):
            result_of(model(x)).square().sum().backward()
        worst = max(worst, difference(ours, theirs))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert_buckets_launched_early(ours)
    return worst, [p.grad is None for p in ours.branches[3].parameters()]


@pytest.mark.parametrize(
    ("set_to_none", "as_view"),
    [
        (False, False),
        pytest.param(True, True, marks=pytest.mark.long),  # as on three ranks
        pytest.param(False, True, marks=pytest.mark.long),
        pytest.param(True, False, marks=pytest.mark.long),
    ],
)
def test_ranks_that_use_different_branches(ranks: Ranks, as_view: bool, set_to_none: bool) -> None:
    arguments = "tensor", as_view, set_to_none, "aot_eager"
    for worst, never_used in ranks(2).run(branch_by_rank_and_step, *arguments):
        assert worst < 1e-6
        assert never_used == [True, True]


@pytest.mark.long
def test_three_ranks(ranks: Ranks) -> None:
    for worst, never_used in ranks(3).run(branch_by_rank_and_step, "tensor", True, True, "aot_eager"):
        assert worst < 1e-6
        assert never_used == [True, True]


@pytest.mark.parametrize("returns", only(["dataclass"], ["dict", "dataclass"]))
def test_outputs_in_containers(ranks: Ranks, returns: str) -> None:
    for worst, _ in ranks(2).run(branch_by_rank_and_step, returns, True, True, "aot_eager"):
        assert worst < 1e-6


@pytest.mark.long
@pytest.mark.inductor
def test_with_inductor(ranks: Ranks) -> None:
    for worst, never_used in ranks(2).run(branch_by_rank_and_step, "tensor", True, True, "inductor"):
        assert worst < 1e-5
        assert never_used == [True, True]


@pytest.mark.parametrize("as_view", only([True], [True, False]))
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
@on_ranks()
def test_a_gradient_that_nobody_adds_to_keeps_every_bit(world_size: int, as_view: bool) -> None:
    """A branch that is used once, and then by nobody: what it holds is not touched, in its memory or out of it."""
    ours, _ = pair(as_view=as_view)
    torch.manual_seed(100 + dist.get_rank())
    choose(1, ours)
    ours(torch.randn(4, WIDTH)).square().sum().backward()
    kept = [p.grad for p in ours.branches[1].parameters()]
    values = [gradient.clone() for gradient in kept]
    choose(0, ours)
    for _ in range(3):
        ours(torch.randn(4, WIDTH)).square().sum().backward()
    assert [
        (p.grad is old, (p.grad - value).abs().max().item())
        for p, old, value in zip(ours.branches[1].parameters(), kept, values, strict=True)
    ] == [(True, 0.0)] * 2


@on_ranks(2)
def test_what_was_used_inside_no_sync_is_reduced() -> None:
    """Used by one rank, in a micro-batch that is not reduced: the iteration after it has to send it all the same."""
    ours, theirs = pair()
    worst = 0.0
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(3):
        for micro_batch in range(3):
            choose(2 if micro_batch == 0 and dist.get_rank() == 0 else 0, ours, theirs)
            x = torch.randn(4, WIDTH)
            for model in (ours, theirs):
                with model.no_sync() if micro_batch < 2 else contextlib.nullcontext():
                    model(x).square().sum().backward()
        worst = max(worst, difference(ours, theirs))
        for model in (ours, theirs):
            model.zero_grad(set_to_none=True)
    assert worst < 1e-6


@on_ranks(2)
def test_outputs_that_are_ignored_and_two_forwards_before_one_backward() -> None:
    """A forward whose outputs are thrown away marks nothing; of two forwards before a backward both count."""
    ours, theirs = pair()
    torch.manual_seed(100 + dist.get_rank())
    x = torch.randn(4, WIDTH)
    choose(1, ours)
    ours(x)
    choose(0, ours, theirs)
    for model in (ours, theirs):
        model(x).square().sum().backward()
    ignored = difference(ours, theirs)
    for model in (ours, theirs):
        model.zero_grad(set_to_none=True)
    whole = theirs.module
    losses = []
    for branch in (1, 2):
        choose(branch, ours, whole)
        losses.append((ours(x).square().sum(), whole(x).square().sum()))
    (losses[0][0] + losses[1][0]).backward()
    (losses[0][1] + losses[1][1]).backward()
    for parameter in whole.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    both = difference(ours, whole)
    assert ignored < 1e-6 and both < 1e-6


@on_ranks(2)
def test_an_output_outside_of_the_loss_is_no_error() -> None:
    """An output that takes no part in the loss: its parameters were reached, and get nothing.

    Run eagerly: a compiled graph returns zeros for them.
    """
    ours, _ = pair("dict", backend="eager")
    outputs = ours(torch.randn(4, WIDTH))
    outputs["losses"][1][0].sum().backward()
    ours(torch.randn(4, WIDTH))
    assert [p.grad is None for p in ours.head.parameters()] + [ours.trunk.weight.grad is None] == [True, True, False]


class SparseBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.embeds = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x)
        return y + self.embedding(torch.arange(4)) if self.embeds else y


def sparse_on_one_rank() -> tuple[bool, Tensor, bool]:
    torch.manual_seed(3)
    model = ddp_compile(SparseBranch(), backend="aot_eager", find_unused_parameters=True)
    model.embeds = dist.get_rank() == 0
    model(torch.ones(4, WIDTH)).sum().backward()
    gradient = model.embedding.weight.grad
    first = (gradient.is_sparse, gradient.to_dense())
    model.zero_grad(set_to_none=True)
    model.embeds = False
    model(torch.ones(4, WIDTH)).sum().backward()
    return *first, model.embedding.weight.grad is None


def test_a_sparse_gradient_of_one_rank(ranks: Ranks) -> None:
    expected = torch.zeros(11, WIDTH)
    expected[:4] = 0.5
    for is_sparse, gradient, is_none in ranks(2).run(sparse_on_one_rank):
        assert is_sparse and torch.equal(gradient, expected) and is_none


def regulariser_on_what_is_not_reached() -> float:
    """A gradient from outside of the module, for a parameter that its outputs do not lead to."""
    ours, _ = pair()
    weight = ours.branches[3][0].weight
    x = torch.full((4, WIDTH), 1.0 + dist.get_rank())
    (ours(x).square().sum() + weight.square().sum() * (1 + dist.get_rank())).backward()
    return relative_difference(weight.grad, 3 * weight.detach())


def test_a_gradient_from_outside_is_exact_or_named(ranks: Ranks) -> None:
    results = ranks(2).run_expecting_failures(regulariser_on_what_is_not_reached)
    for result in results:
        if isinstance(result, float):
            assert result < 1e-6
        else:
            assert result.kind == "GradientArrivalError"
            assert "branches.3.0.weight got a gradient after its bucket had been launched without one" in result.message
