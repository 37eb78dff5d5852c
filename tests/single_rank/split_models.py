"""Models whose graphs are hard to cut: values that cross, regions, checkpoints, breaks, shapes."""

from __future__ import annotations

from typing import Any

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


class CastAtTheTop(Layers):
    def forward(self, x: Tensor) -> Tensor:
        weights = [layer.weight.double().t() for layer in self.layers]
        x = x.double()
        for weight, layer in zip(weights, self.layers, strict=True):
            x = torch.tanh(x @ weight + layer.bias)
        return x


class VaryingFloat(Layers):
    def forward(self, x: Tensor, factor: float) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 1:
                x = x * factor
            if i == 2:
                x = x + factor
        return x


class AutocastInside(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers[:3]:
                x = torch.tanh(layer(x))
            with torch.autocast("cpu", enabled=False):
                x = self.layers[3](x.float())
        return x


class NoGradInside(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = torch.tanh(layer(x))
            with torch.no_grad():
                scale = y.abs().mean()
                scale = scale + layer.weight.abs().mean()
            x = y / (1 + scale)
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


class CheckpointedWhole(Layers):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


class NestedOutput(Layers):
    def forward(self, x: Tensor) -> dict[str, Any]:
        outputs = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            outputs.append(x.transpose(0, 1))
        return {"views": outputs, "nothing": None, "rows": x.shape[0], "last": (x, x[1:])}


class SharedLayer(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, self.layers[0]]:
            x = torch.tanh(layer(x))
        return x


class TiedWeights(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class SplitAndCat(Layers):
    def forward(self, x: Tensor) -> Tensor:
        left, right = self.layers[0](x).chunk(2, dim=1)
        x = self.layers[1](torch.cat([right, left], dim=1))
        parts = x.split([3, 5], dim=1)
        y = self.layers[2](x)
        y = y[:, :3] * parts[0]
        return self.layers[3](torch.cat([y, parts[1]], dim=1))


class UnusedParameter(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.linear(x, layer.weight) + layer.bias.detach().sum()
        return x


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


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad * x  # not the true derivative, so that a lost custom backward shows


class CustomFunction(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Square.apply(torch.tanh(layer(x)))
        return x


class GraphBreaks(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        torch._dynamo.graph_break()
        return torch.tanh(self.layers[3](torch.tanh(self.layers[2](x))))


class Conditional(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cond(x.sum() > 0, lambda y: torch.tanh(y), lambda y: torch.sin(y), (layer(x),))
        return x


class PartialOutput(Layers):
    """The last layer's output is not part of the loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
        return x, self.layers[3](x).detach()


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
