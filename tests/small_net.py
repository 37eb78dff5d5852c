"""A network with a buffer, and the same one replicated, for tests of replicated modules."""

from typing import Any

import torch
from torch import Tensor, nn

from ddp_compile import ddp_compile


class Net(nn.Module):
    """Documented by its author."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))) * scale

    def number_of_layers(self) -> int:
        return 2


def replicated(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return ddp_compile(Net(), **{"backend": "eager", **settings})


def backward(model: nn.Module) -> None:
    model(torch.randn(4, 6)).square().mean().backward()
