"""A mistake of one rank is an error on the others: it names the mistake, within the group's timeout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, loss_of
from rank_pool import on_ranks
from torch import nn

from ddp_compile import MissingGradientError, RanksDifferError, ddp_compile

#: The module, made by a call with the rank, and the difference that the error names.
DIFFERENT_MODELS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "freezing": (
        lambda rank: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(rank == 0)),
        "parameter 1.weight: float32[4, 4] on cpu on rank 0 is parameter 1.weight: float32[4, 4] on cpu frozen on rank",
    ),
    "depth": (
        lambda rank: nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(1 + rank)]),
        "parameter 1.weight: float32[4, 4] on cpu, which rank 0 does not have, exists on rank 1",
    ),
    "strides": (
        lambda rank: nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last if rank else torch.contiguous_format),
        "float32[2, 3, 3, 3] with strides [27, 1, 9, 3] on cpu on rank 1",
    ),
    "sparsity": (
        lambda rank: nn.Embedding(9, 4, sparse=rank == 1),
        "is parameter weight: float32[9, 4] on cpu with sparse gradient on rank 1",
    ),
    "long names": (
        lambda rank: nn.ParameterDict({f"{'x' * 2000}{i}": torch.ones(1 + rank) for i in range(9)}),
        ") on rank 1. Build the same",
    ),
    "buffers": (
        lambda rank: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4 + rank, affine=False)),
        "buffer 1.running_mean: float32[4] on rank 0 is buffer 1.running_mean: float32[5]",
    ),
}


def assert_refused_on_every_rank(module: nn.Module, named: str, **settings: Any) -> None:
    with pytest.raises(RanksDifferError) as raised:
        ddp_compile(module, **settings)
    assert f"rank {dist.get_rank()}:" in str(raised.value) and named in str(raised.value)
    assert len(str(raised.value)) < 3000


@pytest.mark.parametrize("difference", DIFFERENT_MODELS)
@on_ranks(2)
def test_different_models(difference: str) -> None:
    make, named = DIFFERENT_MODELS[difference]
    assert_refused_on_every_rank(make(dist.get_rank()), named, broadcast_buffers=difference != "depth")


@on_ranks(2)
def test_different_settings() -> None:
    named = "find_unused_parameters=False on rank 0 is find_unused_parameters=True on rank 1"
    assert_refused_on_every_rank(nn.Linear(4, 4), named, find_unused_parameters=dist.get_rank() == 1)


class HalfUsed(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


@on_ranks(2)
def test_missing_gradient() -> None:
    model = ddp_compile(HalfUsed(4, 2), backend="eager")
    loss_of(model(torch.randn(2, 4))).backward()
    with pytest.raises(MissingGradientError) as raised:
        model(torch.randn(2, 4))
    message = str(raised.value)
    assert "layers.1.weight" in message and "layers.1.bias" in message
    assert "layers.0.weight" not in message
    assert "requires_grad_(False)" in message and "parameters_to_ignore" in message
