"""Models in which values share memory: every kind of view, of every kind of value, across the places of cuts."""

from collections.abc import Callable, Sequence
from typing import Any

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
    "reverse": Reverse.apply,
    "sine": torch.sin,
}

OPERATIONS = {**VIEWS, **OTHERS}


def scalar_of(value: Tensor) -> Tensor:
    """A number that every element contributes to, each in another way, so that its place matters."""
    return (value.reshape(-1) * torch.cos(torch.arange(value.numel()))).mean()


class SharedMemory(nn.Module):
    """Views of one value are made after the first of three layers and used after the second and the third.

    The value is one of `SOURCES`; if ``returned``, it and its views are outputs, too.
    """

    def __init__(self, source: str, with_gradients: bool, operations: Sequence[str], returned: bool) -> None:
        super().__init__()
        self.source, self.with_gradients, self.operations, self.returned = source, with_gradients, operations, returned
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("constant", torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = {"input": x, "parameter": self.table, "buffer": self.constant}
        x = values["layer"] = torch.tanh(self.layers[0](x))
        values["view"] = x.transpose(0, -1)
        values["detached"] = values["view"].detach()
        views = [values[self.source]]
        for operation in self.operations:
            if self.with_gradients:
                views.append(OPERATIONS[operation](views[0]))
            else:
                with torch.no_grad():
                    views.append(OPERATIONS[operation](views[0]))
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
            for view in views:
                x = x + 0.1 * scalar_of(view)
        return x * self.table.mean(), *(views if self.returned else [])


SOURCES = ("input", "parameter", "buffer", "layer", "view", "detached")
