"""Small models and data that the multi-process tests share."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS_PER_RANK = 4

needs_ddp_to_keep_buffers = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="with torch 2.11 DistributedDataParallel raises where the buffers of a BatchNorm change before the backward",
)


class TanhLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Mlp(nn.Module):
    """About 0.4 MiB of gradients with odd sizes, none a multiple of the alignment."""

    def __init__(self, width: int = 101, num_layers: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Scaled(nn.Module):
    def __init__(self, width: int, num_layers: int = 2) -> None:
        super().__init__()
        self.mlp = Mlp(width, num_layers)
        self.register_buffer("scale", torch.full((width,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.scale


class GptBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.attention(self.norm_1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.projection(attended)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """Token embedding tied to the output layer, so one parameter is used at both ends of the graph."""

    def __init__(self, width: int = 64, num_layers: int = 1, vocabulary: int = 97) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(GptBlock(width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Cnn(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        channels = [3, 16, 24, 32]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in itertools.pairwise(channels))
        self.norms = nn.ModuleList(norm(b) for b in channels[1:])
        self.head = nn.Linear(channels[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.gelu(norm(conv(x)))
        return self.head(x.mean((2, 3)))


def products(width: int, num_layers: int) -> nn.Module:
    """Nothing that inductor would need a C++ compiler for."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))


class Case(NamedTuple):
    """A model and the global batch of one step."""

    make: Callable[[], nn.Module]  #: called with the same seed on every rank
    batch: Callable[[int], Tensor]  #: inputs for a number of rows


CASES = {
    "mlp": Case(Mlp, lambda rows: torch.randn(rows, 101)),
    "gpt": Case(Gpt, lambda rows: torch.randint(0, 97, (rows, 12))),
    "cnn_group_norm": Case(lambda: Cnn(lambda c: nn.GroupNorm(4, c)), lambda rows: torch.randn(rows, 3, 8, 8)),
    "cnn_batch_norm": Case(lambda: Cnn(nn.BatchNorm2d), lambda rows: torch.randn(rows, 3, 8, 8)),
}

ALL_CASES = {**CASES, "products": Case(lambda: products(101, 5), lambda rows: torch.randn(rows, 101))}


def make_model(case: str) -> nn.Module:
    torch.manual_seed(7)
    return ALL_CASES[case].make()


def global_batch(case: str, step: int, world_size: int) -> Tensor:
    torch.manual_seed(1000 + step)
    return ALL_CASES[case].batch(ROWS_PER_RANK * world_size)


def loss_of(output: Tensor) -> Tensor:
    """A mean over rows, so that the mean over ranks of equal shares is the mean over the whole batch."""
    return output.float().square().mean()


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    if ours.is_complex():
        ours, theirs = torch.view_as_real(ours.resolve_conj()), torch.view_as_real(theirs.resolve_conj())
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-300)).item()


def largest(values: Iterable[float]) -> float:
    """As ``max``, but NaN if one is."""
    return torch.tensor(list(values)).max().item()


def assert_buckets_launched_early(model: Any) -> None:
    """All graphs with several buckets are cut, or hand buckets over inside the backward; ask when it has trained."""
    explained = model.explain()
    graphs = [graph for graph in explained.graphs if graph.num_buckets > 1]
    assert graphs, explained.graphs
    assert all(graph.launches_in_backward or len(graph.partitions) > 1 for graph in graphs)
    if any(graph.launches_in_backward for graph in graphs):
        assert any(launch.is_early for launch in explained.launches) or "must not be called twice" in str(explained)


def assert_in_their_buckets(model: Any, padding: int = 128) -> None:
    """All gradients of a bucket lie in one buffer, by their addresses; each is padded by less."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for bucket in model.bucket_plan.buckets:
        of_bucket = [gradients[spec.fqn] for spec in bucket.gradients]
        begin, end = (f(g.data_ptr() + n * g.nbytes for g in of_bucket) for f, n in ((min, 0), (max, 1)))
        assert end - begin <= sum(g.nbytes + padding for g in of_bucket), bucket
