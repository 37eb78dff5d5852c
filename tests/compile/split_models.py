"""Models whose graphs are hard to cut: values that cross, regions, checkpoints, shapes, writes into tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Layers(nn.Module):
    """Four linear layers; subclasses say what happens between them."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))


class Plain(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class KeywordAndListParameters(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.linear(x, bias=layer.bias, weight=layer.weight)
            x = torch.cat([x, layer.weight.sum(0, keepdim=True)]).tanh()
        return x


class AutocastInside(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers[:3]:
                x = torch.tanh(layer(x))
            with torch.autocast("cpu", enabled=False):
                x = self.layers[3](x.float())
        return x


class InferenceModeInside(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.inference_mode(False):
                x = torch.tanh(layer(x))
        return x


class CheckpointedBlocks(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=False)
        return x


class CheckpointedWhole(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class SharedLayer(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, self.layers[0]]:
            x = torch.tanh(layer(x))
        return x


class TiedWeights(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight = self.layers[0].weight


class DataDependentShape(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        rows = (x.detach().sum(1) > -1e9).nonzero().squeeze(1)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x[rows]))
            rows = rows * 1
        return x


class ScalarFromTensor(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        factor = x.detach().abs().max().item()
        x = torch.tanh(self.layers[1](x)) / (1 + factor)
        x = torch.tanh(self.layers[2](x))
        return self.layers[3](x)


class Conditional(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cond(x.sum() > 0, lambda y: torch.tanh(y), lambda y: torch.sin(y), (layer(x),))
        return x


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else WIDTH, WIDTH, 3, padding=1, bias=False) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)), inplace=True)
        return x.mean((2, 3))


class HookOnAGradient(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        y = torch.tanh(self.layers[1](h))
        h.register_hook(lambda gradient: 2 * gradient)
        y = torch.tanh(self.layers[2](y))
        return self.layers[3](y * h)


class FunctionTransforms(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.vmap(lambda row, layer=layer: torch.tanh(layer(row)))(x)
        return x + torch.func.grad(lambda y: y.sin().sum())(x.detach())


class NestedRegions(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = region(layer, x)
        return x


@torch.compiler.nested_compile_region
def region(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(layer(x))


class SizesAcrossLayers(Layers):
    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.size()
        half = rows // 2
        for layer in self.layers:
            x = torch.tanh(layer(x)).reshape(rows * columns).view(rows, columns)
        return x[:half] * half


class InplaceUnderOtherNames(Layers):
    """In-place sums that must stay in place: a view looks on, the history is kept, or the dtype is."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        seen = h.view(-1)
        h += torch.ones_like(h)
        y = self.layers[1](torch.tanh(seen).view_as(h))
        with torch.no_grad():
            y *= 2.0
        z = self.layers[2](y).to(torch.bfloat16)
        z += y.detach()
        return self.layers[3](z.float())


class ConjugatedView(Layers):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(self.layers[0](x), self.layers[1](x))
        conjugated = z.conj()
        z += 1.0
        y = (conjugated * z).real
        return self.layers[3](self.layers[2](torch.tanh(y)))
