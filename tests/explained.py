"""Functions for ``python -m ddp_compile explain``, and the same models trained on real ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_compile import ddp_compile, explain

WIDTH = 64
#: Less than a weight of `WIDTH` by `WIDTH` float32 elements.
CAP_MIB = 0.01


class Layers(nn.Module):
    """A chain of layers with a normalization, whose buffers are written in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


class Tied(Layers):
    """A weight is used twice, and the second output is a dictionary's."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = super().forward(self.layers[0](x))
        return {"hidden": x, "score": F.linear(x, self.layers[2].weight).sum(1)}


class Broken(Layers):
    """Code that Dynamo leaves to Python uses a layer of its own, and one that a graph also uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Linear(WIDTH, WIDTH)  # its backward is the same graph with every compiler

    @torch.compiler.disable
    def in_python(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[2](x).relu())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        return self.norm(self.in_python(x))


def loss_of(outputs: Any) -> Tensor:
    return outputs["hidden"].square().mean() + outputs["score"].mean()


class Unused(Layers):
    """A sequence, and a layer that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def unused() -> Any:
    return Unused(), torch.randn(8, WIDTH)


def layers() -> Any:
    return Layers(), torch.randn(8, WIDTH)


def tied() -> Any:
    return Tied(), (torch.randn(8, WIDTH),), {}, loss_of


def broken() -> Any:
    return Broken(), {"x": torch.randn(8, WIDTH)}


def train(name: str, split: Any, backend: str, **settings: Any) -> str:
    """On real ranks, three steps of what a function here returns; returns the explanation as JSON."""
    torch.manual_seed(0)
    module, inputs, *rest = globals()[name]()
    model = ddp_compile(module, split=split, bucket_cap_mb=CAP_MIB, backend=backend, **settings)
    for _ in range(3):
        model.zero_grad()
        if isinstance(inputs, dict):
            outputs = model(**inputs)
        else:
            outputs = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        loss = rest[1](outputs) if rest else outputs.sum()
        loss.backward()
    return explain(model).to_json()


def train_itself() -> Any:
    return ddp_compile(Layers()), torch.randn(8, WIDTH)


def with_group() -> Any:
    dist.init_process_group("gloo")
    return layers()


def lazy() -> Any:
    return nn.Sequential(nn.LazyLinear(WIDTH)), torch.randn(8, WIDTH)


def wrong_shape() -> Any:
    return Layers(), torch.randn(8, WIDTH + 1)


def no_inputs() -> Any:
    return Layers()


def raising() -> Any:
    raise LookupError("there is no such layer")


class ReadsValues(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


def reads_values() -> Any:
    return ReadsValues(), torch.randn(8, WIDTH)


def bad_loss() -> Any:
    return nn.Linear(2, 2), (torch.randn(8, 2),), {}, lambda outputs: outputs.no_such_field


def a_number() -> Any:
    return 3


def large() -> Any:
    """Half a terabyte of parameters."""
    return nn.Sequential(*(nn.Linear(2**18, 2**17) if i % 2 else nn.Linear(2**17, 2**18) for i in range(4))), (
        torch.randn(1, 2**17)
    )


REAL = Layers()


def made_on_import() -> Any:
    return REAL, torch.randn(8, WIDTH)
