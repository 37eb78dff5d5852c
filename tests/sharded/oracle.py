"""What the tests of sharded optimizers share: a sharded model beside a module whose optimizers are not sharded.

On each rank the plain module's optimizers step by the reduced gradients of the sharded model. Parameters and states
have to have the same bits after each step, on any number of ranks. Gradients have to be the mean over the ranks.
"""

import copy
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import flat_of, own_batch
from fuzz.sharded import OPTIMIZERS
from models import Mlp, loss_of
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from ddp_compile import ddp_compile, shard_optimizer

CAP_MB = 0.004
WIDTH = 19


class Net(nn.Module):
    """Matrices of several shapes, one of them transposed in memory, vectors, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 33)
        self.norm = nn.LayerNorm(33)
        self.middle = nn.ModuleList(nn.Linear(33, 33) for _ in range(3))
        self.middle[0].bias.requires_grad_(False)
        self.middle[1].weight.data = self.middle[1].weight.data.t().contiguous().t()
        self.last = nn.Linear(33, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        for layer in self.middle:
            x = x + torch.tanh(layer(x))
        return self.last(x)


class Whitening(Optimizer):
    """As users write them: a step of a matrix needs all of it, and its states are float32 vectors in a list."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state, squares = self.state[p], p.grad.float().square()
                    if not state:
                        state["scales"], state["count"] = [torch.ones(size) for size in p.shape], 0
                    rows, columns = state["scales"]
                    assert rows.dtype == columns.dtype == torch.float32
                    rows.lerp_(squares.mean(1), 0.1)
                    columns.lerp_(squares.mean(0), 0.1)
                    state["count"] += 1
                    p.sub_((group["lr"] * p.grad / (rows.sqrt()[:, None] * columns.sqrt())).to(p.dtype))
        return loss


def matrices_and_others(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [p for p in module.parameters() if p.dim() == 2]
    return matrices, [p for p in module.parameters() if p.dim() != 2]


def muon(module: nn.Module) -> list[Optimizer]:
    matrices, others = matrices_and_others(module)
    groups = [{"params": matrices[:2], "lr": 0.03}, {"params": matrices[2:]}]
    return [optim.Muon(groups, lr=0.02), optim.AdamW(others, lr=0.01)]


class Momentum(optim.SGD):
    """Of a user: whether it works element by element has to be said."""


def two(module: nn.Module) -> list[Optimizer]:
    matrices, others = matrices_and_others(module)
    return [Momentum(others, lr=0.1, momentum=0.9), optim.AdamW(matrices, lr=0.01, fused=True)]


def whitening(module: nn.Module) -> list[Optimizer]:
    matrices, others = matrices_and_others(module)
    return [optim.SGD(others, lr=0.1), Whitening(matrices)]


def in_groups(make: Callable[[Any], Optimizer]) -> Callable[[nn.Module], list[Optimizer]]:
    """Of one optimizer: weight decay for matrices, another learning rate for the rest."""

    def of(module: nn.Module) -> list[Optimizer]:
        matrices, others = matrices_and_others(module)
        return [make([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.003}])]

    return of


#: How optimizers are made, and what `shard_optimizer` is told.
KINDS: dict[str, tuple[Callable[[nn.Module], list[Optimizer]], dict[str, Any]]] = {
    "adamw": (in_groups(lambda p: optim.AdamW(p, lr=0.01, fused=True)), {}),
    "muon": (muon, {}),
    "adafactor": (lambda module: [optim.Adafactor(module.parameters(), lr=0.02)], {}),
    "two": (two, {"elementwise": True}),
    "whitening": (whitening, {"elementwise": False}),
}


def batch(step: int) -> Tensor:
    return own_batch(step, WIDTH, rows=6)


class Pair:
    """A sharded model, and a plain module whose optimizers step by its gradients.

    With another ``dtype`` the model has master weights, and the plain module has the same values in float32.
    """

    def __init__(self, kind: str, net: Callable[[], nn.Module] = Net, **settings: Any) -> None:
        torch.manual_seed(1)
        make, of_kind = KINDS[kind]
        self.dtype = settings.pop("dtype", torch.float32)
        module = net().to(self.dtype)
        self.reference = copy.deepcopy(module).float()
        settings = {"backend": "eager", "split": "backward", "bucket_cap_mb": CAP_MB} | settings
        overlap = settings.pop("overlap", True)
        self.model: Any = ddp_compile(module, **settings)
        self.optimizers = make(self.model)
        of_kind = {"overlap": overlap, "master_weights": self.dtype != torch.float32, **of_kind}
        assert shard_optimizer(self.optimizers, self.model, **of_kind) is self.optimizers
        self.of_reference = make(self.reference)
        self.schedulers = [
            [optim.lr_scheduler.StepLR(each, 3, 0.5) for each in of_kind]
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
        if self.dtype == torch.float32:
            self.compare_gradients(batch(step))
        self.follow()
        if clips:
            self.clip()
        self.step()
        for each in self.optimizers:
            each.zero_grad()
        self.compare()

    def compare_gradients(self, x: Tensor) -> None:
        """They are the mean over the ranks of what the plain module computes."""
        self.reference.zero_grad()
        loss_of(self.reference(x)).backward()
        gradients = self.model.full_gradients()
        for name, parameter in self.reference.named_parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                torch.testing.assert_close(gradients[name], parameter.grad / dist.get_world_size())

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


def unequal(mine: Any, theirs: Any, path: str = "", tolerance: float = 0.0) -> list[str]:
    """The paths in two nested states at which they differ."""
    if isinstance(theirs, Tensor):
        is_same = isinstance(mine, Tensor) and mine.dtype == theirs.dtype and mine.shape == theirs.shape
        is_same = is_same and torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance)
        return [] if is_same and mine.stride() == theirs.stride() else [path]
    if isinstance(theirs, dict):
        if mine.keys() != theirs.keys():
            return [path]
        return [each for key in theirs for each in unequal(mine[key], theirs[key], f"{path}/{key}", tolerance)]
    if isinstance(theirs, list | tuple):
        if len(mine) != len(theirs):
            return [path]
        return [each for i in range(len(theirs)) for each in unequal(mine[i], theirs[i], f"{path}/{i}", tolerance)]
    return [] if mine == theirs else [path]


def make(
    kind: str = "adamw", module: nn.Module | None = None, sharded: bool = True, overlap: bool = True, **settings: Any
) -> tuple[Any, Optimizer]:
    """A model, of four layers by default, and one optimizer that is stepped element by element."""
    torch.manual_seed(1)
    module = Mlp(WIDTH, 4) if module is None else module
    model = ddp_compile(module, bucket_cap_mb=0.001, **{"backend": "eager", **settings})
    (optimizer,) = in_groups(OPTIMIZERS[kind])(module)
    return model, shard_optimizer(optimizer, model, overlap=overlap) if sharded else optimizer


def plain(model: Any, optimizer: Any, step: int) -> None:
    loss_of(model(batch(step))).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_trains_alike(
    train: Callable[[Any, Any], None], module: Callable[[], nn.Module] | None = None, tolerance: float = 0.0, **how: Any
) -> None:
    """Check that ``train(model, optimizer)`` ends with the same parameters with shards and without."""
    ends = []
    for sharded in (True, False):
        torch.manual_seed(2)
        model, optimizer = make(module=module and module(), sharded=sharded, **how)
        train(model, optimizer)
        ends.append(flat_of(model))
    assert torch.allclose(*ends, rtol=0.0, atol=tolerance), (train.__name__, how)


@contextmanager
def late_rank(rank: int = 1) -> Iterator[None]:
    """What this rank sends in its steps comes so late that others read before, if they do not wait."""
    if dist.get_rank() == rank:
        time.sleep(0.15)
    yield


def in_a_child(read: Callable[[], Any]) -> Any:
    """What a process that is forked here has read."""
    source, sink = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of a process with threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        os.write(sink, pickle.dumps(read()))
        os._exit(0)
    os.close(sink)
    _, status = os.waitpid(child, 0)
    assert status == 0
    with os.fdopen(source, "rb") as pipe:
        return pickle.load(pipe)


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """An error is raised in here whose class and message contain all of these; RANK stands for this rank."""
    with pytest.raises((RuntimeError, ValueError, TypeError)) as raised:
        yield
    said = f"{type(raised.value).__name__}: {raised.value}"
    for part in parts:
        assert part.replace("RANK", f"rank {dist.get_rank()}") in said, said


def said_by(attempt: Callable[[], Any], kinds: Any = (RuntimeError, ValueError, TypeError)) -> str:
    """The class and message of the error that a call raises."""
    with pytest.raises(kinds) as raised:
        attempt()
    return f"{type(raised.value).__name__}: {raised.value}"
