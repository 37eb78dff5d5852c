"""A mistake of one rank is an error on the others: it names the mistake, within the group's timeout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import beside_plain, train_beside
from models import Mlp, largest, loss_of
from rank_pool import on_ranks
from torch import nn

from ddp_compile import MissingGradientError, RanksDifferError, ddp_compile


def frozen_on_rank_1() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias.requires_grad_(dist.get_rank() == 0)
    return model


def strides_by_rank(rank: int) -> nn.Module:
    convolution = nn.Conv2d(3, 2, 3)
    return convolution.to(memory_format=torch.channels_last) if rank else convolution


#: The module, made by a call with the rank, and the difference that the error names.
DIFFERENT_MODELS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "width": (
        lambda rank: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + rank)),
        "parameter 1.weight: float32[4, 4] on cpu on rank 0 is parameter 1.weight: float32[5, 4] on cpu on rank 1",
    ),
    "freezing": (
        lambda rank: frozen_on_rank_1(),
        "parameter 1.bias: float32[4] on cpu on rank 0 is parameter 1.bias: float32[4] on cpu frozen on rank 1",
    ),
    "depth": (
        lambda rank: nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(1 + rank)]),
        "parameter 1.weight: float32[4, 4] on cpu, which rank 0 does not have, exists on rank 1",
    ),
    "strides": (strides_by_rank, "float32[2, 3, 3, 3] with strides [27, 1, 9, 3] on cpu on rank 1"),
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


class ToDtype(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(self.layer.weight.dtype))


def of_two_dtypes() -> nn.Module:
    layers = nn.Linear(6, 6, dtype=torch.bfloat16), nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(6, 6), *map(ToDtype, layers))


@on_ranks(2)
def test_two_dtypes() -> None:
    models = beside_plain(of_two_dtypes)
    assert largest(train_beside(models, width=6)) < 1e-2
    assert {p.grad.dtype for p in models[0].parameters()} == {torch.bfloat16, torch.float32}
