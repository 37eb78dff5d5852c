"""Sharded models beside plain modules that follow them.

On each rank the unsharded optimizers of a plain module step by the reduced gradients of the sharded model: parameters
and states have to have the same bits after each step, on any number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models import loss_of
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from ddp_compile import ddp_compile, shard_optimizer

CAP_MB = 0.004
WIDTH = 19


class Net(nn.Module):
    """Matrices of several shapes, one of them transposed in memory, and parameters that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 33)
        self.norm = nn.LayerNorm(33)
        self.middle = nn.ModuleList(nn.Linear(33, 33) for _ in range(3))
        self.middle[1].weight.data = self.middle[1].weight.data.t().contiguous().t()
        self.last = nn.Linear(33, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        for layer in self.middle:
            x = x + torch.tanh(layer(x))
        return self.last(x)


class Whitening(Optimizer):
    """As users write them: a step of a matrix needs all of it, and its states are lists of other matrices."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    assert p.dim() == 2
                    state = self.state[p]
                    if not state:
                        state["sides"] = [torch.eye(size, dtype=p.dtype) for size in p.shape]
                        state["count"] = 0
                    left, right = state["sides"]
                    left.lerp_(p.grad @ p.grad.t(), 0.1)
                    right.lerp_(p.grad.t() @ p.grad, 0.1)
                    state["count"] += 1
                    p.sub_(group["lr"] * torch.linalg.solve(left, p.grad) @ torch.linalg.inv(right))
        return loss


def matrices_and_others(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [p for p in module.parameters() if p.dim() == 2]
    return matrices, [p for p in module.parameters() if p.dim() != 2]


def muon(module: nn.Module) -> list[Optimizer]:
    matrices, others = matrices_and_others(module)
    groups = [{"params": matrices[:2], "lr": 0.03}, {"params": matrices[2:]}]
    return [torch.optim.Muon(groups, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def two_of_torch(module: nn.Module) -> list[Optimizer]:
    matrices, others = matrices_and_others(module)
    return [torch.optim.SGD(others, lr=0.1, momentum=0.9), torch.optim.AdamW(matrices, lr=0.01, fused=True)]


def whitening(module: nn.Module) -> list[Optimizer]:
    matrices, others = matrices_and_others(module)
    return [torch.optim.SGD(others, lr=0.1), Whitening(matrices)]


KINDS: dict[str, tuple[Callable[[nn.Module], list[Optimizer]], dict[str, Any]]] = {
    "muon": (muon, {}),
    "adafactor": (lambda module: [torch.optim.Adafactor(module.parameters(), lr=0.02)], {}),
    "two": (two_of_torch, {}),
    "whitening": (whitening, {"placement": "whole"}),
}


def batch(step: int) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    return torch.randn(6, WIDTH)


class Pair:
    """A sharded model, and a module that follows its gradients with unsharded optimizers.

    With another ``dtype`` the model has master weights, and the module that follows has the same values in float32.
    """

    def __init__(self, kind: str, sharded: bool = True, **settings: Any) -> None:
        torch.manual_seed(1)
        make, of_kind = KINDS[kind]
        self.dtype = settings.pop("dtype", torch.float32)
        module = Net().to(self.dtype)
        self.reference = copy.deepcopy(module).float()
        settings = {"backend": "eager", "split": "backward", "bucket_cap_mb": CAP_MB} | settings
        overlap = settings.pop("overlap", True)
        self.model: Any = ddp_compile(module, **settings)
        self.optimizers = make(self.model)
        if sharded:
            of_kind = {"overlap": overlap, "master_weights": self.dtype != torch.float32, **of_kind}
            assert shard_optimizer(self.optimizers, self.model, **of_kind) == self.optimizers
        self.of_reference = make(self.reference)
        self.schedulers = [
            [torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in of_kind]
            for of_kind in (self.optimizers, self.of_reference)
        ]

    def follow(self) -> None:
        """Give the reference the reduced gradients."""
        gradients = self.model.full_gradients()
        for name, parameter in self.reference.named_parameters():
            parameter.grad = gradients[name].float() if name in gradients else None

    def step(self) -> None:
        for each in (*self.optimizers, *self.of_reference):
            each.step()
        for of_kind in self.schedulers:
            for scheduler in of_kind:
                scheduler.step()

    def train(self, step: int, clips: bool = False) -> None:
        loss_of(self.model(batch(step).to(self.dtype)).float()).backward()
        self.follow()
        if clips:
            self.clip()
        self.step()
        for each in self.optimizers:
            each.zero_grad()
        self.compare()

    def clip(self) -> None:
        """To half of the norm; the reference by the norm that the sharded model finds, whose last digits may differ."""
        parameters = list(self.reference.parameters())
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        found = self.model.clip_grad_norm_(float(norm) / 2)
        assert torch.allclose(found, norm, rtol=1e-6)
        clip_grads_with_norm_(parameters, float(norm) / 2, found)

    def compare(self) -> None:
        pairs = zip(self.model.named_parameters(), self.reference.parameters(), strict=True)
        different = [name for (name, mine), theirs in pairs if not torch.equal(mine, theirs.to(mine.dtype))]
        assert not different, different
        assert not self.differences()

    def differences(self) -> list[str]:
        """Names of the states that differ; called on every rank."""
        found = []
        for mine, theirs in zip(self.optimizers, self.of_reference, strict=True):
            states = mine.state_dict(), theirs.state_dict()
            found += [f"{type(mine).__name__}: {path}" for path in unequal(*states)]
        return found


def unequal(mine: Any, theirs: Any, path: str = "") -> list[str]:
    if isinstance(theirs, Tensor):
        is_same = isinstance(mine, Tensor) and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        return [] if is_same and mine.stride() == theirs.stride() else [path]
    if isinstance(theirs, dict):
        if mine.keys() != theirs.keys():
            return [path]
        return [each for key in theirs for each in unequal(mine[key], theirs[key], f"{path}/{key}")]
    if isinstance(theirs, list | tuple):
        if len(mine) != len(theirs):
            return [path]
        return [each for i in range(len(theirs)) for each in unequal(mine[i], theirs[i], f"{path}/{i}")]
    return [] if mine == theirs else [path]
