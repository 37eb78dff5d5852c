"""A model of six equal layers, for tests that count how many of six buckets are launched early."""

import torch
from torch import Tensor, nn

WIDTH = 64
#: Holds one layer's weight, in MiB.
ONE_LAYER_MIB = 0.01


class ResidualLayers(nn.Module):
    """``x`` [rows, `WIDTH`] -> [rows, `WIDTH`]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x
