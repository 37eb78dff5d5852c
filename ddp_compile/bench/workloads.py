"""Models to measure, each with its data and its loss."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_compile.bench.loss_scale import PADDING
from ddp_compile.bench.settings import WorkloadSettings
from ddp_compile.validation.named_functions import load_function


class Workload(NamedTuple):
    """A model, its data and its loss.

    Args:
        model: Called with the first result of ``make_batch``.
        make_batch: Makes inputs and targets on the CPU from a seeded generator.
        loss: Scalar loss of the model's output and the targets: a mean, or with ``--tokens`` a sum over tokens.
    """

    model: nn.Module
    make_batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


class Sizes(NamedTuple):
    """Number of layers, features of a layer, samples of a micro-batch."""

    depth: int
    width: int
    batch_size: int


class MLP(nn.Module):
    """Equal linear layers: as many gradient bytes as possible for little computation."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class Block(nn.Module):
    """Pre-norm transformer block with causal attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Language model with a separate head; input of shape (batch, length), output (batch, length, vocabulary)."""

    def __init__(self, depth: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """Two convolutions with BatchNorm, halving the image when the number of channels doubles."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        stride = 1 if channels_in == channels_out else 2
        self.convolution_1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(channels_out)
        self.convolution_2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.convolution_1(x)))
        return F.relu(self.norm_2(self.convolution_2(y)) + self.shortcut(x))


class CNN(nn.Module):
    """A residual network like ResNet: four stages, each with twice the channels of the one before."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        channels = [width * 2 ** (4 * i // depth) for i in range(depth)]
        self.blocks = nn.ModuleList(Residual(a, b) for a, b in zip([width, *channels], channels, strict=False))
        self.head = nn.Linear(channels[-1], 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class ManyTiny(nn.Module):
    """Many small layers, to measure the cost of a parameter rather than of a byte."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _regression(width: int, batch_size: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return (
            torch.randn(batch_size, width, generator=generator),
            torch.randn(batch_size, width, generator=generator),
        )

    return make_batch


def _next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _make_mlp(sizes: Sizes) -> Workload:
    return Workload(MLP(sizes.depth, sizes.width), _regression(sizes.width, sizes.batch_size), F.mse_loss)


def _make_many_tiny(sizes: Sizes) -> Workload:
    return Workload(ManyTiny(sizes.depth, sizes.width), _regression(sizes.width, sizes.batch_size), F.mse_loss)


def _make_gpt(sizes: Sizes) -> Workload:
    vocabulary, length = 4096, 128

    def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocabulary, (sizes.batch_size, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Workload(GPT(sizes.depth, sizes.width, vocabulary, length), make_batch, _next_token_loss)


def _make_cnn(sizes: Sizes) -> Workload:
    def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(sizes.batch_size, 3, 32, 32, generator=generator)
        return images, torch.randint(100, (sizes.batch_size,), generator=generator)

    return Workload(CNN(sizes.depth, sizes.width), make_batch, F.cross_entropy)


def _with_uneven_lengths(workload: Workload) -> Workload:
    """A language model's workload with sequences of a quarter to the whole of its length, padded at their ends."""

    def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, targets = workload.make_batch(generator)
        batch_size, length = targets.shape
        lengths = torch.randint(length // 4, length + 1, (batch_size, 1), generator=generator)
        is_padding = torch.arange(length) >= lengths
        return tokens.masked_fill(is_padding, 0), targets.masked_fill(is_padding, PADDING)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")

    return Workload(workload.model, make_batch, loss)


#: Name of each model: how it is made, and its default sizes.
WORKLOADS: dict[str, tuple[Callable[[Sizes], Workload], Sizes]] = {
    "mlp": (_make_mlp, Sizes(depth=8, width=1024, batch_size=64)),
    "gpt-small": (_make_gpt, Sizes(depth=4, width=256, batch_size=4)),
    "gpt-medium": (_make_gpt, Sizes(depth=6, width=512, batch_size=4)),
    "cnn": (_make_cnn, Sizes(depth=8, width=32, batch_size=16)),
    "many-tiny": (_make_many_tiny, Sizes(depth=500, width=16, batch_size=16)),
}
LANGUAGE_MODELS = [name for name, (make, _) in WORKLOADS.items() if make is _make_gpt]


def check_tokens(model: str) -> None:
    """Raise a ValueError if a model has no sequences that could have uneven lengths."""
    if model not in LANGUAGE_MODELS:
        raise ValueError(
            f"--tokens gives the sequences of a language model uneven lengths, and --model {model} is none; pass"
            f" --model {' or '.join(LANGUAGE_MODELS)}, or leave --tokens out"
        )


def make_workload(settings: WorkloadSettings) -> Workload:
    """The workload with its model on the CPU; the same initial weights on every call.

    Raises a ValueError if the model is not known, or has no sequences of ``settings.tokens``.
    """
    torch.manual_seed(0)
    if settings.tokens:
        check_tokens(settings.model)
    if settings.model not in WORKLOADS:
        # A user's function chooses the sizes itself.
        return Workload(*load_function("model", settings.model, WORKLOADS)())
    make, defaults = WORKLOADS[settings.model]
    chosen = {name: value for name in Sizes._fields if (value := getattr(settings, name)) is not None}
    workload = make(defaults._replace(**chosen))
    return _with_uneven_lengths(workload) if settings.tokens else workload
