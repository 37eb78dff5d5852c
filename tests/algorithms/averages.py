"""The oracle of algorithms that average parameters: one process with the models of all ranks."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from beside import flat_of
from models import Mlp, loss_of
from torch import Tensor, nn

from ddp_compile import ddp_compile
from ddp_compile.algorithms import AlgorithmConfig


class Simulation:
    """As many models as ranks, each with its optimizer, in one process."""

    def __init__(self, module: nn.Module, size: int) -> None:
        self.size = size
        self.models = [copy.deepcopy(module) for _ in range(size)]
        self.optimizers = [make_adamw(model.parameters()) for model in self.models]

    def flats(self) -> list[Tensor]:
        return [flat_of(model) for model in self.models]

    def set(self, rank: int, flat: Tensor) -> None:
        nn.utils.vector_to_parameters(flat.clone(), self.models[rank].parameters())

    def compute_gradients(self, step: int) -> None:
        for rank, model in enumerate(self.models):
            self.optimizers[rank].zero_grad()
            for micro_step in range(micro_steps_of(step)):
                loss_of(model(batch(rank, step, micro_step))).backward()

    def average_gradients(self) -> None:
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            mean = torch.stack([p.grad for p in parameters]).sum(0) / self.size
            for parameter in parameters:
                parameter.grad = mean.clone()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def batch(rank: int, step: int, micro_step: int) -> Tensor:
    torch.manual_seed(10_000 * rank + 10 * step + micro_step)
    return torch.randn(5, 17)


def micro_steps_of(step: int) -> int:
    return 2 if step % 3 == 2 else 1


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def make_model(algorithm: AlgorithmConfig, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = ddp_compile(
        Mlp(17, 4), algorithm=algorithm, **{"bucket_cap_mb": 0.001, "backend": "eager", **settings}
    )
    return model, make_adamw(model.parameters())


def train_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    for micro_step in range(micro_steps_of(step)):
        is_last = micro_step == micro_steps_of(step) - 1
        with nullcontext() if is_last else model.no_sync():
            loss_of(model(batch(dist.get_rank(), step, micro_step))).backward()
    optimizer.step()


def closure_of(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> Callable[[], Tensor]:
    """What ``optimizer.step`` may call for the loss."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        return loss

    return closure


@contextmanager
def on_nodes(*sizes: int) -> Iterator[None]:
    """Inside, ranks are told what a launcher tells them on nodes with so many ranks each."""
    places = [place for size in sizes for place in range(size)]
    with patch.dict(os.environ, LOCAL_RANK=str(places[dist.get_rank()])):
        yield


def error_of(kind: type[Exception], call: Any) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)
