"""Hooks on AccumulateGrad nodes: what they make of a gradient is what is averaged, whenever they were registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import GradientArrivalError, ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

NUM_STEPS = 6
APPEARS_AT = 4


def write_behind(parameter: nn.Parameter) -> Any:
    """A hook behind the node that writes into ``.grad``; returns the node, without which the hook is gone."""

    def hook(_inputs: object, _outputs: object) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.01 * (dist.get_rank() + 1))

    node = get_gradient_edge(parameter).node
    node.register_hook(hook)
    return node


def write_before(parameter: nn.Parameter) -> Any:
    """A hook before the node that writes where no version shows it."""

    def hook(gradients: tuple[Tensor, ...]) -> None:
        gradients[0].data.mul_(0.01 * (dist.get_rank() + 1))

    node = get_gradient_edge(parameter).node
    node.register_prehook(hook)
    return node


def write_before_on_one_rank(parameter: nn.Parameter) -> Any:
    return write_before(parameter) if dist.get_rank() == 1 else None


KINDS = [write_behind, write_before, write_before_on_one_rank]


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())  # type: ignore[union-attr]


@pytest.mark.parametrize("cap_mb", [1e-4, pytest.param(5, marks=pytest.mark.long)])
@pytest.mark.parametrize("when", only([APPEARS_AT], [None, 0, APPEARS_AT]))
@pytest.mark.parametrize("kind", only([write_behind, write_before_on_one_rank], KINDS))
@on_ranks(2)
def test_what_hooks_on_nodes_make_of_gradients_is_averaged(
    kind: Callable[[nn.Parameter], Any], when: int | None, cap_mb: float
) -> None:
    models = []
    for _ in range(3):
        torch.manual_seed(5)
        models.append(Mlp(7, 4))
    mine, theirs, alone = models
    nodes = []
    if when is None:
        for model in models:
            nodes += [kind(parameter) for parameter in model.parameters()]
    ddp = DistributedDataParallel(theirs)
    mine = ddp_compile(mine, bucket_cap_mb=cap_mb, backend="aot_eager")
    worst = []
    for step in range(NUM_STEPS):
        if step == when:
            nodes += [kind(parameter) for parameter in alone.parameters()]
            for parameter in mine.parameters():
                kind(parameter)  # the reducer holds the node
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, 7)
        for model in (mine, ddp, alone):
            model.zero_grad()
            loss_of(model(x)).backward()
        average(alone)
        # A hook that is registered after the wrapping comes too late for the mean of DistributedDataParallel.
        for reference in (alone, theirs) if when is None else (alone,):
            pairs = zip(mine.parameters(), reference.parameters(), strict=True)
            worst.append(max(relative_difference(p.grad, q.grad) for p, q in pairs))
    assert max(worst) < 1e-5, worst


def train_with_comm_hook() -> list[float] | str:
    torch.manual_seed(5)
    mine = ddp_compile(Mlp(7, 4), bucket_cap_mb=1e-4, backend="aot_eager")
    mine.register_comm_hook(None, allreduce_hook)
    torch.manual_seed(5)
    alone = Mlp(7, 4)
    worst, nodes = [], []
    for step in range(NUM_STEPS):
        if step == APPEARS_AT:
            for model in (mine, alone):
                nodes += [write_before_on_one_rank(parameter) for parameter in model.parameters()]
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, 7)
        for model in (mine, alone):
            model.zero_grad()
        loss_of(alone(x)).backward()
        average(alone)
        try:
            loss_of(mine(x)).backward()
        except GradientArrivalError as error:
            assert step == APPEARS_AT
            return str(error)
        pairs = zip(mine.parameters(), alone.parameters(), strict=True)
        worst.append(max(relative_difference(p.grad, q.grad) for p, q in pairs))
    return worst


def test_with_a_comm_hook_what_changes_behind_a_bucket_is_an_error(
    ranks: Callable[[int], RankPool], split: str
) -> None:
    for came in ranks(2).run(train_with_comm_hook):
        if split == "backward":
            assert isinstance(came, str) and "layers.3.weight" in came
        else:
            assert not isinstance(came, str) and max(came) < 1e-5


@on_ranks(2)
def test_nodes_live_as_long_as_the_module() -> None:
    torch.manual_seed(5)
    model = ddp_compile(Mlp(7, 4), backend="aot_eager")
    count = []
    for parameter in model.parameters():
        get_gradient_edge(parameter).node.register_hook(lambda *_: count.append(1))
    for _ in range(3):
        loss_of(model(torch.randn(4, 7))).backward()
    count = len(count)
    assert count == 3 * len(list(Mlp(7, 4).parameters()))


@on_ranks(2)
def test_gradients_that_are_taken_away_are_an_error() -> None:
    """As optimizers do that step inside the backward."""
    torch.manual_seed(5)
    model = ddp_compile(Mlp(7, 4), backend="aot_eager", bucket_cap_mb=1e-4)

    def take(parameter: nn.Parameter) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        get_gradient_edge(parameter).node.register_hook(lambda *_, p=parameter: take(p))
    with pytest.raises(GradientArrivalError, match=r"layers\.3\.\w+ was set to None before it was averaged"):
        loss_of(model(torch.randn(4, 7))).backward()
