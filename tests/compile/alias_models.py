"""Models in which values share memory: every kind of view, of every kind of value, across the places of cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Reverse(torch.autograd.Function):
    """A view with a backward that is not linear: made twice, it would give another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad.clamp(-0.01, 0.01)


class TwoViews(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y.transpose(0, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> Tensor:
        return 2 * grad.clamp(-0.02, 0.02) + 2 * other.transpose(0, -1)


class Signed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        return x.view_as(x), sign

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        return 3 * grad


def hooked(x: Tensor) -> Tensor:
    y = torch.tanh(x)
    y.register_hook(lambda grad: grad * 2)
    return y


#: Views, and functions that return their argument unchanged, of tensors with at least one dimension.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda v: v[:],
    "atleast_3d": torch.atleast_3d,
    "broadcast_to": lambda v: torch.broadcast_to(v, (2, *v.shape)),
    "chunk": lambda v: v.chunk(2)[-1],
    "contiguous": lambda v: v.contiguous(),
    "cpu": lambda v: v.cpu(),
    "data": lambda v: v.data,
    "detach": lambda v: v.detach(),
    "diagonal": lambda v: v[None].diagonal(),
    "dropout_0": lambda v: F.dropout(v, 0.0, True),
    "dropout_eval": lambda v: F.dropout(v, 0.5, False),
    "einsum": lambda v: torch.einsum("ab->ba", v.flatten(1) if v.dim() > 1 else v[None]),
    "expand": lambda v: v[None].expand(2, *v.shape),
    "expand_as": lambda v: v.expand_as(v),
    "flatten": lambda v: v.flatten(),
    "half_of_it": lambda v: v[: (v.shape[0] + 1) // 2],
    "last": lambda v: v[-1:],
    "mT": lambda v: v[None].mT,
    "movedim": lambda v: v.movedim(0, -1),
    "narrow": lambda v: v.narrow(0, 0, 1),
    "permute": lambda v: v.permute(*[v.dim() - 1 - i for i in range(v.dim())]),
    "real": lambda v: v.real,
    "reshape": lambda v: v.reshape(-1),
    "same_dtype": lambda v: v.to(v.dtype),
    "split": lambda v: torch.split(v, 1)[0],
    "squeeze": lambda v: v.unsqueeze(-1).squeeze(-1),
    "tensor_split": lambda v: torch.tensor_split(v, 2)[0],
    "transpose": lambda v: v.transpose(0, -1),
    "unbind": lambda v: v[None].unbind(0)[0],
    "unfold": lambda v: v.unfold(0, 1, 1),
    "unsafe_chunk": lambda v: v.unsafe_chunk(2)[0],
    "view": lambda v: v.view(v.shape),
    "view_as_complex": lambda v: torch.view_as_complex(torch.stack([v, v], -1)).real,
}

#: Functions that compute, have their own backward, or make a new tensor.
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "as_strided": lambda v: torch.as_strided(v, (1,), (1,)),
    "checkpoint": lambda v: checkpoint(torch.sin, v, use_reentrant=False),
    "checkpointed_identity": lambda v: checkpoint(lambda z: z, v, use_reentrant=False),
    "checkpointed_view": lambda v: checkpoint(lambda z: z.transpose(0, -1), v, use_reentrant=False),
    "clone": lambda v: v.clone(),
    "hooked": lambda v: hooked(v) if v.requires_grad and torch.is_grad_enabled() else v,
    "reverse": Reverse.apply,
    "signed": lambda v: Signed.apply(v)[1],
    "sine": torch.sin,
    "two_views": lambda v: TwoViews.apply(v)[1],
}

OPERATIONS = {**VIEWS, **OTHERS}


class Step(NamedTuple):
    """One thing that is done between two layers."""

    kind: str  # "make" another value, "make_no_grad", or "use" one
    operation: str  # in `OPERATIONS`; empty for "use"
    source: int  # position of a value among those there are


class Recipe(NamedTuple):
    """What a model computes.

    Values are the input, the parameter, the buffer, then all that are made, in order, a layer's own result first.
    """

    steps: tuple[tuple[Step, ...], ...]  # after each layer
    returned: tuple[int, ...]  # positions of values, beside the last layer's result
    input_requires_grad: bool


def scalar_of(value: Tensor) -> Tensor:
    """A number that every element contributes to, each in another way, so that its place matters."""
    return (value.reshape(-1) * torch.cos(torch.arange(value.numel()))).mean()


class SharedMemory(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in recipe.steps)
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("constant", torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x, self.table, self.constant]
        for layer, steps in zip(self.layers, self.recipe.steps, strict=True):
            x = torch.tanh(layer(x))
            values.append(x)
            for kind, operation, source in steps:
                if kind == "use":
                    x = x + 0.1 * scalar_of(values[source])
                elif kind == "make_no_grad":
                    with torch.no_grad():
                        values.append(OPERATIONS[operation](values[source]))
                else:
                    values.append(OPERATIONS[operation](values[source]))
        return x * self.table.mean(), *[values[i] for i in self.recipe.returned]


#: Position of the value that the views of `all_views` are of.
SOURCES = {"input": 0, "parameter": 1, "buffer": 2, "layer": 3, "view": 4, "detached": 5}


def all_views(source: str, kind: str, operations: Sequence[str], returned: bool) -> Recipe:
    """Views of one value are made after the first of three layers and used after the second and the third."""
    prepared = (Step("make", "transpose", 3), Step("make", "detach", 4))
    made = tuple(Step(kind, operation, SOURCES[source]) for operation in operations)
    first = 3 + 1 + len(prepared)
    views = [SOURCES[source], *range(first, first + len(made))]
    uses = tuple(Step("use", "", i) for i in views)
    return Recipe(((*prepared, *made), uses, uses), tuple(views) if returned else (), source == "input")
