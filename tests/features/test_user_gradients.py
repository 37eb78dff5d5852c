"""Users keep, replace and save ``.grad``: they see what they see with eager DistributedDataParallel."""

import copy
import io
from typing import Any

import pytest
import torch
from beside import own_batch, pair, seeded
from models import Mlp, assert_in_their_buckets, largest, loss_of, relative_difference
from rank_pool import on_ranks
from torch import Tensor, nn

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")


class User:
    """One training loop. Subclasses define what it does with gradients.

    `test_documented_code` has one more, of docs/migration.md, which keeps the gradients of two losses.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)

    def step(self, x: Tensor) -> list[Tensor]:
        """Returns what the user has looked at."""
        raise NotImplementedError


class LendsGradients(User):
    """To the parameters of another model, so that nothing of Python's holds them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.other = [nn.Parameter(p.detach().clone()) for p in self.parameters]

    def step(self, x: Tensor) -> list[Tensor]:
        self.optimizer.zero_grad()
        loss_of(self.model(x)).backward()
        before = [p.grad.clone() for p in self.other if p.grad is not None]
        for mine, theirs in zip(self.parameters, self.other, strict=True):
            theirs.grad = mine.grad
        self.optimizer.step()
        return [*before, *(p.grad for p in self.parameters if p.grad is not None)]


class FlatBufferOfTheirOwn(User):
    """Gradients are views of one tensor, which is zeroed and looked at as a whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters))
        sizes = [p.numel() for p in self.parameters]
        for parameter, part in zip(self.parameters, self.flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def step(self, x: Tensor) -> list[Tensor]:
        self.flat.zero_()
        loss_of(self.model(x)).backward()
        self.optimizer.step()
        return [self.flat]


class Accumulates(User):
    """And keeps the gradients that a local backward has made, which the next one adds to."""

    def step(self, x: Tensor) -> list[Tensor]:
        self.optimizer.zero_grad()
        with self.model.no_sync():
            loss_of(self.model(x[:3])).backward()
        kept = [p.grad for p in self.parameters]
        loss_of(self.model(x[3:])).backward()
        self.optimizer.step()
        return kept


USERS = {kind.__name__: kind for kind in User.__subclasses__()}


class WithEagerTail(Mlp):
    """One layer that no graph shows, whose bucket is packed again after the first iteration."""

    @torch.compiler.disable
    def tail(self, x: Tensor) -> Tensor:
        return self.layers[0](x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(x)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x


def train(user: str, **settings: Any) -> float:
    models = pair(lambda: WithEagerTail(17, 5), bucket_cap_mb=0.002, **settings)
    users = [USERS[user](model) for model in models]
    worst = [0.0]
    for step in range(4):
        ours, theirs = (each.step(own_batch(step, 17, 6)) for each in users)
        worst += map(relative_difference, ours, theirs)
    return largest(worst)


@pytest.mark.parametrize("user", USERS)
@on_ranks(2)
def test_users_see_ddps_gradients(user: str, split: str) -> None:
    # Backends make no difference to who holds a gradient, but that nothing leaves inside an uncompiled backward.
    backend = "eager" if split == "forward" else "aot_eager"
    assert train(user, backend=backend, find_unused_parameters=user == "FlatBufferOfTheirOwn") == 0


@on_ranks(2)
def test_gradients_stay_in_their_buffers() -> None:
    """Where nobody holds them, all of a bucket in one; a gradient is saved and copied alone."""
    model: Any = ddp_compile(seeded(lambda: Mlp(17, 5)), bucket_cap_mb=0.002, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    for _ in range(4):
        for rows in (3, 4):
            loss_of(model(torch.randn(rows, 17))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert all(p.grad.stride() == p.stride() for p in model.parameters())
        seen.append([p.grad.data_ptr() for p in model.parameters()])
        assert_in_their_buckets(model)
        optimizer.step()
        optimizer.zero_grad()
    assert seen == [seen[0]] * 4
    loss_of(model(torch.randn(3, 17))).backward()
    gradient, saved = model.layers[0].bias.grad, io.BytesIO()
    torch.save(gradient, saved)
    assert len(saved.getvalue()) < 2000
    assert copy.deepcopy(gradient).untyped_storage().nbytes() == 17 * 4
