"""``skip_all_reduce_unused_params``: buckets that no rank uses are not sent, and all else is as without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import relative_difference
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import GradientArrivalError, ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

Ranks = Callable[[int], RankPool]
WIDTH = 17
NUM_STEPS = 4


class Branches(nn.Module):
    """Several branches between two layers, of which each call takes one."""

    def __init__(self, branch: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.branches[self.branch](self.first(x))))


def pair(branch: int, skip_in_ddp: bool = True, **settings: Any) -> tuple[Any, Any]:
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(Branches(branch))
    settings = {"bucket_cap_mb": 0.0005, **settings}
    ours = ddp_compile(models[0], backend="aot_eager", skip_all_reduce_unused_params=True, **settings)
    return ours, DistributedDataParallel(models[1], skip_all_reduce_unused_params=skip_in_ddp, **settings)


def count_launches(model: Any) -> list[str]:
    """A list to which the names of the parameters of each bucket are added that is sent."""
    algorithm = model._ddp_compile_state.reducer.algorithm
    launched, launch = [], algorithm.launch

    def counted(bucket: Any, is_last: bool) -> Any:
        launched.extend(gradient.fqn for gradient in bucket.spec.gradients)
        return launch(bucket, is_last)

    algorithm.launch = counted
    return launched


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    worst = 0.0
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        if (p.grad is None) != (q.grad is None):
            return float("inf")
        if p.grad is not None:
            worst = max(worst, relative_difference(p.grad, q.grad))
    return worst


def same_branch(rank: int) -> int:
    return 1


@pytest.mark.parametrize("promise", only(["find_unused_parameters"], ["find_unused_parameters", "static_graph"]))
@pytest.mark.parametrize("set_to_none", only([True], [False, True]))
@on_ranks(2)
def test_what_no_rank_uses_is_not_sent_again(promise: str, set_to_none: bool) -> None:
    ours, theirs = pair(same_branch(dist.get_rank()), **{promise: True})
    launched, sent, worst = count_launches(ours), [], 0.0
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (ours, theirs)]
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(NUM_STEPS):
        x = torch.randn(4, WIDTH)
        launched.clear()
        for each in (ours, theirs):
            if promise == "find_unused_parameters":  # else DistributedDataParallel fails an assertion of its own
                with each.no_sync():
                    each(2 * x).square().sum().backward()
            each(x).square().sum().backward()
        worst = max(worst, difference(ours, theirs))
        sent.append(sorted(name for name in launched if name.startswith("branches")))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert worst < 1e-6
    assert len(sent[0]) == 8  # nobody has heard of the others yet
    assert sent[1:] == [["branches.1.bias", "branches.1.weight"]] * (NUM_STEPS - 1)


@on_ranks(2)
def test_what_one_rank_uses_is_sent() -> None:
    """DistributedDataParallel's ranks would wait for each other for ever: the reference sends everything."""
    ours, theirs = pair(dist.get_rank(), skip_in_ddp=False, find_unused_parameters=True)
    launched, worst = count_launches(ours), 0.0
    for step in range(NUM_STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, WIDTH)
        launched.clear()
        for each in (ours, theirs):
            each.zero_grad()
            each(x).square().sum().backward()
        worst = max(worst, difference(ours, theirs))
    num_sent = len(launched)
    assert worst < 1e-6
    assert num_sent == 2 * (2 + 2)


@on_ranks(2)
def test_what_is_used_after_all_is_named_on_every_rank() -> None:
    """In the third step one rank takes a branch that nobody has used."""
    rank = dist.get_rank()
    ours, theirs = pair(1, find_unused_parameters=True)
    message = ""
    for step in range(4):
        ours.branch = 3 if step == 2 and rank == 1 else 1
        torch.manual_seed(10 * step + rank)
        x = torch.randn(4, WIDTH)
        ours.zero_grad()
        try:
            ours(x).square().sum().backward()
        except GradientArrivalError as error:
            message = f"{step}: {error}"
    ours.zero_grad()
    theirs.zero_grad()
    for each in (ours, theirs):  # the ranks are in step
        each(x).square().sum().backward()
    worst = difference(ours, theirs)
    assert message.startswith(f"2: rank {rank}: branches.3.weight, branches.3.bias got a gradient, on this rank or")
    assert "replicate the module again without it" in message
    assert worst < 1e-6


@on_ranks(2)
def test_what_shares_a_bucket_that_is_sent_may_be_used_later() -> None:
    """The branches that rank 0 does not take are one bucket, of which the second step uses more than the first did."""
    ours, theirs = pair(dist.get_rank(), skip_in_ddp=False, find_unused_parameters=True, bucket_cap_mb=0.0025)
    worst = []
    for step in range(4):
        ours.branch = theirs.module.branch = 1 + 2 * (step % 2) if dist.get_rank() else 0
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, WIDTH)
        for each in (ours, theirs):
            each.zero_grad()
            each(x).square().sum().backward()
        worst.append(difference(ours, theirs))
    assert max(worst) < 1e-6


def test_without_anything_unused_it_is_said_to_have_no_effect(single_rank_group: None) -> None:
    with pytest.warns(UserWarning, match="skip_all_reduce_unused_params=True has no effect without find_unused"):
        ddp_compile(nn.Linear(2, 2), skip_all_reduce_unused_params=True, backend="eager")
