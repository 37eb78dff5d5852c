"""A byte-level GPT: pre-norm transformer blocks with causal attention, and one output class for each byte."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # every value of a byte
PADDING = -100  # a target that does not count


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a `GPT`. Its blocks hold about ``12 * layers * width ** 2`` parameters.

    Args:
        layers: Number of transformer blocks.
        heads: Attention heads of a block; divides ``width``.
        width: Size of the residual stream.
        context: Longest input in bytes.
    """

    layers: int
    heads: int
    width: int
    context: int

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}")


class Attention(nn.Module):
    """Causal self-attention, ``(batch, length, width)`` to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, length, width) -> three of (batch, heads, length, width / heads)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._initialize(config)

    def _initialize(self, config: GPTConfig) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue  # biases and norms keep the layers' own initial values
            # Layers that add to the residual stream start with smaller weights, so that its variance does not grow with
            # depth.
            adds_to_residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
            nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * config.layers) if adds_to_residual else 1))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte.

        Args:
            tokens: Bytes as int64, ``(batch, length)`` with ``length <= context``.

        Returns:
            Float tensor ``(batch, length, 256)``.
        """
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats, and how many bytes it is the sum over (scalars); guessing costs ``ln 256 = 5.55`` a byte.

    Args:
        model: A `GPT`.
        tokens: Bytes as int64, ``(batch, length)``.
        targets: The byte that follows each of them or PADDING, int64, ``(batch, length)``.
    """
    logits = model(tokens).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=PADDING, reduction="sum")
    return loss, (targets != PADDING).sum()
