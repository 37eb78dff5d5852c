"""``static_graph``: what it learns in the first iteration, against eager DistributedDataParallel."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import one_backward, own_batch, pair, train_beside
from models import Mlp, largest, loss_of, relative_difference
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_compile import GradientArrivalError, MissingGradientError, ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

WIDTH = 13


class SharedUnderCheckpoints(nn.Module):
    """One layer under several checkpoints, a layer of its own, and one that is not used."""

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


def models(use_reentrant: bool) -> tuple[Any, Any]:
    both = {"bucket_cap_mb": 0.0005, "static_graph": True, "gradient_as_bucket_view": True}
    return pair(lambda: SharedUnderCheckpoints(use_reentrant), both)


@pytest.mark.parametrize("use_reentrant", [True, False])
@on_ranks(2)
def test_checkpoints_over_one_weight(use_reentrant: bool) -> None:
    ours, theirs = models(use_reentrant)
    arrivals = []
    ours.shared.weight.register_post_accumulate_grad_hook(lambda _: arrivals.append(1))
    for step in range(4):
        for model in (ours, theirs):
            model.zero_grad()
            one_backward(model, own_batch(step, WIDTH))
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert name.startswith("spare") or relative_difference(p.grad, q.grad) < 1e-6, name
    assert all(p.grad is None for p in ours.spare.parameters())
    # The case is there: a reentrant checkpoint brings the weight's gradient once for each of its uses.
    assert len(arrivals) == 4 * (3 if use_reentrant else 1)


@on_ranks(2)
def test_checkpoint_around_the_module() -> None:
    def step_of(model: nn.Module, x: Tensor, step: int) -> None:
        loss_of(checkpoint(model, x.requires_grad_(), use_reentrant=True)).backward()

    models = pair(lambda: Mlp(WIDTH, 3), {"static_graph": True}, bucket_cap_mb=0.0005)
    assert largest(train_beside(models, step_of, 4, width=WIDTH)) < 1e-6


@on_ranks(2)
def test_parameter_used_by_the_loss_alone() -> None:
    """A parameter that the forward does not use, but the loss does, in every iteration."""
    ours, _ = models(use_reentrant=False)
    for _ in range(3):
        ours.zero_grad()
        x = torch.full((4, WIDTH), 1.0 + dist.get_rank())
        (ours(x).sum() + (1 + dist.get_rank()) * ours.spare.weight.square().sum()).backward()
        assert relative_difference(ours.spare.weight.grad, 3 * ours.spare.weight.detach()) < 1e-6


@pytest.mark.parametrize(
    ("first", "second", "error", "message"),
    [
        (False, True, GradientArrivalError, "spare.* got a gradient after .*static_graph=True promises that this"),
        (True, False, MissingGradientError, "2 of 6 parameters got no gradient .*spare.*static_graph=True, a param"),
    ],
)
@on_ranks(2)
def test_broken_promise(first: bool, second: bool, error: type[Exception], message: str) -> None:
    ours, _ = models(use_reentrant=False)
    x = torch.ones(4, WIDTH)
    ours.uses_spare = first
    ours(x).sum().backward()
    ours.uses_spare = second
    with pytest.raises(error, match=message):
        ours(x).sum().backward()
        ours(x)


def test_static_graph_with_find_unused(single_rank_group: None) -> None:
    with pytest.warns(UserWarning, match="find_unused_parameters=True has no effect with static_graph=True"):
        ddp_compile(nn.Linear(2, 2), static_graph=True, find_unused_parameters=True, backend="eager")
