"""Models that write into tensors: activations, residual streams, views, buffers, inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from split_models import WIDTH, Layers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class InplaceActivation(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x), inplace=True)
        return x


class InplaceResidual(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for layer in self.layers:
            x += torch.tanh(layer(x.clone()))
        return x


class InplaceSlices(Layers):
    """Every write goes into a part of one tensor that stays in use, so no cut is possible."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for layer in self.layers:
            x[:2] += torch.tanh(layer(x.clone()))[:2]
        return x


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


class AugmentedMatmul(Layers):
    """``@=`` is written like an in-place operation, but tensors have none."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(x + layer.bias)
            x @= layer.weight
        return x


class ConjugatedView(Layers):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(self.layers[0](x), self.layers[1](x))
        conjugated = z.conj()
        z += 1.0
        y = (conjugated * z).real
        return self.layers[3](self.layers[2](torch.tanh(y)))


class KeywordOrder(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            F.leaky_relu(negative_slope=0.1, input=h, inplace=True)
            x = h + layer.weight.sum()
        return x


class RingInCheckpoints(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(4, WIDTH))

    def body(self, layer: nn.Module, i: int, x: Tensor) -> Tensor:
        x = torch.tanh(layer(x)) + self.ring[i]
        self.ring[i].copy_(x.detach()[0] * 0 + 1)
        return x

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = checkpoint(self.body, layer, i, x, use_reentrant=False)
        return x


class WriteThroughView(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        first = x[:1]
        y = torch.tanh(self.layers[1](x.detach().clone()))
        z = torch.tanh(self.layers[2](y))
        first.mul_(2.0)
        return self.layers[3](z + x)


class BufferWrites(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("ring", torch.zeros(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            self.count.add_(1)
            self.ring[i].copy_(x.detach()[0])
        return x + self.count + self.ring.sum()


class BufferReadThenWritten(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x)) + self.scale
        x = torch.tanh(self.layers[1](x)) + self.scale
        x = torch.tanh(self.layers[2](x))
        self.scale.mul_(1.5)
        return self.layers[3](x) * self.scale


class InputWritten(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        for layer in self.layers:
            y = torch.tanh(layer(y))
        x.mul_(2.0)
        return y


class WriteThroughViewOfASlice(Layers):
    """The views are made right before the writes, where a cut would like to be."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        flat = x.view(-1)
        flat += self.layers[1](torch.ones_like(x)).view(-1)
        x = self.layers[2](x)
        x[:, :2].mul_(2.0)
        return self.layers[3](x)


class SharedNormInCheckpoints(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def body(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(layer(x)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.body, layer, x, use_reentrant=False)
            self.calls += 1
        return x


class KeywordInplaceActivations(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            F.relu(input=y, inplace=True)
            x = torch.relu_(input=y + 0.1)
        return x
