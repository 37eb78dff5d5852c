"""Building blocks of random modules: each takes activations of shape (rows, WIDTH), and returns such activations.

Every block works after any other, so that leaving blocks out makes a failing module smaller. What a block
keeps for a later one (a view, a detached tensor, ...) goes through the list ``kept``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 4
NUM_IDS = 5


@dataclass(frozen=True)
class Block:
    """A kind of block, and the blocks inside it, if it has any."""

    kind: str
    inner: tuple[Block, ...] = ()

    def __repr__(self) -> str:
        return f"Block({self.kind!r}{f', {self.inner!r}' if self.inner else ''})"


class Arguments(NamedTuple):
    """Arguments of a forward besides its activations."""

    ids: Tensor
    scale: float
    route: bool


class TimesTwo(torch.autograd.Function):
    """Its backward is not the derivative of its forward, so that code that differentiates the forward is found."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, 3 * (gradient * x).sum(0)


def apply_no_gradient(x: Tensor, block: Leaf) -> Tensor:
    with torch.no_grad():
        size = block.weight.abs().mean()
    return x * size + block.weight


def write_kept(h: Tensor, kept: list[Tensor]) -> Tensor:
    if kept:
        kept[-1].mul_(0.5)
    return h


def with_kept(h: Tensor, kept: list[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return combine(h, kept[-1].reshape(h.shape[0], -1)[:, :1]) if kept else h


def keep(h: Tensor, kept: list[Tensor], value: Tensor) -> Tensor:
    kept.append(value)
    return h


def break_graph(h: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return h


def halve_half(h: Tensor) -> Tensor:
    h[:, :2].mul_(0.5)
    return h


def add_to_half(h: Tensor, bias: Tensor) -> Tensor:
    h[:, :2] += bias
    return h


def fill(h: Tensor) -> Tensor:
    filled = torch.zeros_like(h)
    filled[:, :2] = h[:, 2:].tanh()
    filled[:, 2:] = h[:, :2]
    return filled


def hooked(h: Tensor) -> Tensor:
    h = h.tanh()
    h.register_hook(lambda gradient: 2 * gradient)
    return h


def conjugated(h: Tensor) -> Tensor:
    """A view of a value that is then written."""
    z = torch.complex(h, h.tanh())
    view = z.conj()
    z += 1.0
    return (view * z).real


def sizes(h: Tensor) -> Tensor:
    rows, columns = h.size()
    return h.reshape(rows * columns).tanh().view(h.size()) * (rows // 2)


#: Blocks without a state: ``f(h, kept, arguments)``.
FUNCTIONS: dict[str, Callable[[Tensor, list[Tensor], Arguments], Tensor]] = {
    "tanh": lambda h, kept, a: h.tanh(),
    "gelu": lambda h, kept, a: F.gelu(h),
    "relu_": lambda h, kept, a: F.relu(h, inplace=True),
    "double_": lambda h, kept, a: h.mul_(2),
    "write_half": lambda h, kept, a: halve_half(h),
    "fill": lambda h, kept, a: fill(h),
    "transposed": lambda h, kept, a: h.t().contiguous().t(),
    "chunk": lambda h, kept, a: torch.cat([h.chunk(2, -1)[1], h.chunk(2, -1)[0].tanh()], -1),
    "split_add_": lambda h, kept, a: torch.cat([h[:, :2], h[:, 2:] + h[:, :2]], -1),
    "expand": lambda h, kept, a: h.unsqueeze(1).expand(-1, 3, -1).mean(1),
    "rows": lambda h, kept, a: h / h.shape[0],
    "softmax": lambda h, kept, a: h.softmax(-1),
    "detached_part": lambda h, kept, a: h + 0.5 * h.detach(),
    "scale": lambda h, kept, a: h * a.scale,
    "graph_break": lambda h, kept, a: break_graph(h),
    "item": lambda h, kept, a: h * 2 if h.detach().abs().sum().item() > 1e9 else h,
    "keep": lambda h, kept, a: keep(h, kept, h),
    "keep_view": lambda h, kept, a: keep(h, kept, h.view(-1, 2)),
    "keep_half": lambda h, kept, a: keep(h, kept, h[:, 2:]),
    "keep_transposed": lambda h, kept, a: keep(h, kept, h.t()),
    "keep_detached": lambda h, kept, a: keep(h, kept, h.detach()),
    "keep_detached_view": lambda h, kept, a: keep(h, kept, h.view(-1, 2).detach()),
    "keep_clone": lambda h, kept, a: keep(h, kept, h.clone()),
    "add_kept": lambda h, kept, a: with_kept(h, kept, torch.add),
    "multiply_kept": lambda h, kept, a: with_kept(h, kept, torch.mul),
    "add_kept_": lambda h, kept, a: with_kept(h, kept, Tensor.add_),
    "write_kept": lambda h, kept, a: write_kept(h, kept),
    "hooked": lambda h, kept, a: hooked(h),
    "conjugated": lambda h, kept, a: conjugated(h),
    "sizes": lambda h, kept, a: sizes(h),
    "condition": lambda h, kept, a: torch.cond(h.sum() > 0, torch.tanh, torch.sin, (h,)),
    "transforms": lambda h, kept, a: torch.vmap(torch.tanh)(h) + torch.func.grad(lambda x: x.sin().sum())(h.detach()),
}


class Leaf(nn.Module):
    """Blocks with parameters or buffers of their own. ``shared`` is the module's first linear layer."""

    def __init__(self, kind: str, shared: nn.Linear) -> None:
        super().__init__()
        self.kind = kind
        self.function = LEAVES[kind]
        if kind in AROUND_LINEAR:
            self.linear = AROUND_LINEAR[kind](nn.Linear(WIDTH, WIDTH))
        elif kind in ("same_layer", "no_grad_shared"):
            self.linear = shared
        elif kind == "tied":
            self.weight = shared.weight
        elif kind in ("embedding", "sparse_embedding"):
            self.embedding = nn.Embedding(NUM_IDS, WIDTH, sparse=kind == "sparse_embedding")
        elif kind == "layer_norm":
            self.norm = nn.LayerNorm(WIDTH)
        elif kind == "batch_norm":
            self.norm = nn.BatchNorm1d(WIDTH)
        else:
            self.weight = nn.Parameter(torch.randn(WIDTH))
        if kind == "counter":
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        if kind in ("running_mean", "replaced_buffer"):
            self.register_buffer("mean", torch.zeros(WIDTH))
        if kind == "cache":
            self.register_buffer("positions", torch.arange(3.0))
        self.before: Tensor | None = None
        self.calls = 0

    def forward(self, h: Tensor, kept: list[Tensor], a: Arguments) -> Tensor:
        return self.function(self, h, a)


def no_grad_shared(block: Leaf, h: Tensor) -> Tensor:
    with torch.no_grad():
        wide = block.linear(h)
    return h + wide


def counter(block: Leaf, h: Tensor) -> Tensor:
    block.count += 1
    return h * block.weight


def running_mean(block: Leaf, h: Tensor) -> Tensor:
    if block.training:
        block.mean.lerp_(h.detach().mean(0), 0.5)
    return (h - block.mean) * block.weight


def replaced_buffer(block: Leaf, h: Tensor) -> Tensor:
    if block.training:
        block.mean = block.mean + 0.5
    return (h - block.mean) * block.weight


def cache(block: Leaf, h: Tensor) -> Tensor:
    if len(h) > len(block.positions):
        block.positions = torch.arange(float(len(h)))
    return h * block.weight + block.positions[: len(h), None].to(h.dtype)


def remembers(block: Leaf, h: Tensor) -> Tensor:
    before, block.before = block.before, h.detach().mean()
    return h * block.weight if before is None else h * block.weight + before


def counts_calls(block: Leaf, h: Tensor) -> Tensor:
    block.calls += 1
    return h * block.weight * (2 if block.calls % 2 else 1)


#: What is done with a linear layer.
AROUND_LINEAR: dict[str, Callable[[nn.Linear], Any]] = {
    "linear": lambda layer: layer,
    "linear_": lambda layer: layer,
    "frozen": lambda layer: layer.requires_grad_(False),
    "spectral_norm": spectral_norm,
    "by_keyword": lambda layer: layer,
    "convolution": lambda layer: nn.Conv2d(1, 1, 3, padding=1, bias=False).to(memory_format=torch.channels_last),
    "disabled": torch.compiler.disable,
    "scripted": torch.jit.script,
}

LEAVES: dict[str, Callable[[Leaf, Tensor, Arguments], Tensor]] = {
    **dict.fromkeys(AROUND_LINEAR, lambda b, h, a: b.linear(h)),
    "linear_": lambda b, h, a: h.add_(b.linear(h.clone())),
    "by_keyword": lambda b, h, a: torch.cat([F.linear(h, bias=b.linear.bias, weight=b.linear.weight), b.linear.weight])[
        : len(h)
    ],
    "convolution": lambda b, h, a: b.linear(h.view(len(h), 1, 2, 2)).reshape(h.shape),
    "same_layer": lambda b, h, a: b.linear(h),
    "no_grad_shared": lambda b, h, a: no_grad_shared(b, h),
    "tied": lambda b, h, a: F.linear(h, b.weight.t()),
    "embedding": lambda b, h, a: h + b.embedding(a.ids),
    "sparse_embedding": lambda b, h, a: h + b.embedding(a.ids),
    "layer_norm": lambda b, h, a: b.norm(h),
    "batch_norm": lambda b, h, a: b.norm(h),
    "weight": lambda b, h, a: h * b.weight,
    "bias_": lambda b, h, a: h.add_(b.weight),
    "bias_half_": lambda b, h, a: add_to_half(h, b.weight[:2]),
    "normalized": lambda b, h, a: h * (b.weight / b.weight.norm()),
    "weight_read_without_gradient": lambda b, h, a: apply_no_gradient(h, b),
    "function": lambda b, h, a: TimesTwo.apply(h, b.weight),
    "counter": lambda b, h, a: counter(b, h),
    "running_mean": lambda b, h, a: running_mean(b, h),
    "replaced_buffer": lambda b, h, a: replaced_buffer(b, h),
    "cache": lambda b, h, a: cache(b, h),
    "remembers": lambda b, h, a: remembers(b, h),
    "counts_calls": lambda b, h, a: counts_calls(b, h),
}


class Holder(nn.Module):
    """Blocks that hold others."""

    def __init__(self, block: Block, shared: nn.Linear) -> None:
        super().__init__()
        self.kind = block.kind
        self.function = HOLDERS[block.kind]
        self.blocks = build(block.inner, shared)
        self.other = nn.Linear(WIDTH, WIDTH) if block.kind == "branch" else None

    def forward(self, h: Tensor, kept: list[Tensor], a: Arguments) -> Tensor:
        return self.function(self, h, kept, a)

    def run(self, h: Tensor, kept: Sequence[Tensor], a: Arguments) -> Tensor:
        return run(self.blocks, h, list(kept), a)


def checkpointed(block: Holder, h: Tensor, kept: list[Tensor], a: Arguments, reentrant: bool) -> Tensor:
    def inner(h: Tensor, *kept: Tensor) -> Tensor:
        # Copies: a checkpoint that writes into what it is given computes something else the second time.
        return block.run(h.clone(), [value.clone() for value in kept], a)

    return checkpoint(inner, h, *kept, use_reentrant=reentrant)


def without_grad(block: Holder, h: Tensor, kept: list[Tensor], a: Arguments) -> Tensor:
    with torch.no_grad():
        more = block.run(h.clone(), [value.clone() for value in kept], a)
    return h + more


def residual_(block: Holder, h: Tensor, kept: list[Tensor], a: Arguments) -> Tensor:
    h += block.run(h.clone(), kept, a)
    return h


def inside(context: Callable[[], Any]) -> Callable[[Holder, Tensor, list[Tensor], Arguments], Tensor]:
    def run_inside(block: Holder, h: Tensor, kept: list[Tensor], a: Arguments) -> Tensor:
        with context():
            return block.run(h, kept, a)

    return run_inside


def with_autocast(block: Holder, h: Tensor, kept: list[Tensor], a: Arguments) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = block.run(h, kept, a)
        with torch.autocast("cpu", enabled=False):
            return block.run(h.to(kept[-1].dtype if kept else torch.float32), kept, a)


HOLDERS: dict[str, Callable[[Holder, Tensor, list[Tensor], Arguments], Tensor]] = {
    "submodule": lambda b, h, kept, a: b.run(h, kept, a),
    "residual": lambda b, h, kept, a: h + b.run(h.clone(), kept, a),
    "residual_": residual_,
    "twice": lambda b, h, kept, a: b.run(b.run(h, kept, a), kept, a),
    "checkpoint": lambda b, h, kept, a: checkpointed(b, h, kept, a, False),
    "reentrant_checkpoint": lambda b, h, kept, a: checkpointed(b, h, kept, a, True),
    "no_grad": without_grad,
    "branch": lambda b, h, kept, a: b.run(h, kept, a) if a.route else b.other(h),
    "autocast": with_autocast,
    "inference_mode": inside(lambda: torch.inference_mode(False)),
    "nested_region": lambda b, h, kept, a: torch.compiler.nested_compile_region(lambda x: b.run(x, [], a))(h),
    "not_compiled": lambda b, h, kept, a: torch.compiler.disable(b.run)(h, kept, a),
}


def build(blocks: Sequence[Block], shared: nn.Linear) -> nn.ModuleList:
    """Modules with a forward of (h, kept, arguments); blocks without a state are `Stateless`."""
    return nn.ModuleList(_build_one(block, shared) for block in blocks)


def _build_one(block: Block, shared: nn.Linear) -> nn.Module:
    if block.kind in HOLDERS:
        return Holder(block, shared)
    return Leaf(block.kind, shared) if block.kind in LEAVES else Stateless(block.kind)


class Stateless(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.function = FUNCTIONS[kind]

    def forward(self, h: Tensor, kept: list[Tensor], a: Arguments) -> Tensor:
        return self.function(h, kept, a)


def run(blocks: nn.ModuleList, h: Tensor, kept: list[Tensor], a: Arguments) -> Tensor:
    for block in blocks:
        h = block(h, kept, a)
    return h
