"""Graphs for which AOTAutograd's cache would answer wrongly: trained twice, the second time with a full cache."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_compile import ddp_compile

pytestmark = [pytest.mark.inductor, pytest.mark.long, pytest.mark.usefixtures("single_rank_group")]

WIDTH = 8


class Scaled(nn.Module):
    """A float that goes into an operator that takes a symbol, and into one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(x, x, self.weight, alpha=self.scale) * self.scale


class TwoViews(nn.Module):
    """Outputs that are views of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y.transpose(0, 1), y.transpose(1, 2)


def largest_difference(model: nn.Module, x: Tensor, scales: tuple[float, ...] = (1.0,), **settings: Any) -> float:
    """How far outputs in evaluation and training, and gradients, are from the eager model's."""
    torch._dynamo.reset()
    reference = copy.deepcopy(model)
    replica = ddp_compile(model, **settings)
    differences = []
    for mode, scale in itertools.product((False, True), scales):
        model.scale = reference.scale = scale  # type: ignore[assignment]
        of_both = []
        for each in (replica, reference):
            with torch.set_grad_enabled(mode):
                outputs = each.train(mode)(x)
            parts = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            if mode:
                each.zero_grad()
                torch.stack([part.square().mean() for part in parts]).sum().backward()
            of_both.append([*parts, *(p.grad for p in each.parameters() if p.grad is not None)])
        differences += [(ours - eager).abs().max().item() for ours, eager in zip(*of_both, strict=True)]
    return max(differences)


def test_varying_float_is_not_cached() -> None:
    for scales in ((0.5, 0.25), (0.5, 1.5)):
        torch.manual_seed(0)
        # In evaluation graphs are compiled as under split="none", in training with an edit of the backward.
        assert largest_difference(Scaled(), torch.randn(WIDTH, WIDTH), scales, split="backward") < 1e-5


def test_aliased_outputs_are_not_cached() -> None:
    for _ in range(2):
        torch.manual_seed(0)
        assert largest_difference(TwoViews(), torch.randn(2, 4, WIDTH)) < 1e-5
