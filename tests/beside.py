"""Train a replicated model beside DistributedDataParallel, or beside the plain module with averaged gradients."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models import largest, loss_of, relative_difference
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile

#: Called with a model, this rank's batch and the number of the step.
Step = Callable[[Any, Tensor, int], None]


def one_backward(model: Any, x: Tensor, step: int = 0) -> None:
    loss_of(model(x)).backward()


def seeded(make: Callable[[], Any], seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return make()


def made_on(device: str, make: Callable[[], nn.Module]) -> nn.Module:
    """Not moved there, since on their way to a device of PrivateUse1 modules lose tied weights (torch 2.13)."""
    with torch.device(device):
        return seeded(make)


def pair(
    make: Callable[[], nn.Module], both: dict[str, Any] | None = None, device: str = "cpu", **settings: Any
) -> tuple[Any, Any]:
    """Ours, and DistributedDataParallel's on the CPU, with equal parameters; ``both`` are settings of both."""
    ours = ddp_compile(made_on(device, make), **{"backend": "aot_eager", **(both or {}), **settings})
    return ours, DistributedDataParallel(seeded(make), **(both or {}))


def beside_plain(make: Callable[[], nn.Module], device: str = "cpu", **settings: Any) -> tuple[Any, Any]:
    """Ours on a device and the plain module on the CPU, with equal parameters."""
    plain = seeded(make)
    ours = copy.deepcopy(plain) if device == "cpu" else made_on(device, make)
    return ddp_compile(ours, **{"backend": "aot_eager", **settings}), plain


def own_batch(step: int, width: int, rows: int = 4) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    return torch.randn(rows, width)


def gathered(value: Any) -> list[Any]:
    """The value of each rank."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, value)
    return of_ranks


def of_all_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Shape (ranks, *shape)."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tensors, tensor.detach(), group=group)
    return torch.stack(tensors)


def is_same_everywhere(tensor: Tensor) -> bool:
    everyone = of_all_ranks(tensor)
    return bool((everyone == everyone[0]).all())


@torch.no_grad()
def average(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Make each gradient the mean over the ranks; a rank without one contributes zeros."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient, group=group)
            parameter.grad = gradient / dist.get_world_size(group)


def difference(ours: nn.Module, theirs: nn.Module, none_is_zero: bool = False) -> float:
    """Largest relative difference of two gradients; infinite if only one of the two is there, unless that is a zero."""
    worst = [0.0]
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        found, expected = (torch.zeros_like(p) if each is None and none_is_zero else each for each in (p.grad, q.grad))
        if found is None or expected is None:
            worst.append(0.0 if found is expected else float("inf"))
        else:
            worst.append(relative_difference(found.to(expected.device), expected))
    return largest(worst)


def flat_of(module: nn.Module) -> Tensor:
    """All parameters, shape (n,)."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def difference_to_mean(ours: nn.Module, plain: nn.Module, group: dist.ProcessGroup | None = None) -> float:
    """`difference` to the mean over the ranks of the plain module's gradients, which become that mean."""
    average(plain, group)
    return difference(ours, plain, none_is_zero=True)


def train_beside(
    models: tuple[Any, Any],
    step_of: Step = one_backward,
    num_steps: int = 3,
    *,
    width: int,
    rows: int = 4,
    set_to_none: bool = True,
    **sgd: float,
) -> list[float]:
    """The `difference` of the two models after each step; a second one that is not replicated is averaged first.

    Batches are of shape (rows, width). Without settings of ``sgd`` parameters stay.
    """
    optimizers = [torch.optim.SGD(model.parameters(), **sgd) for model in models] if sgd else []
    differences = []
    for step in range(num_steps):
        x = own_batch(step, width, rows)
        for model in models:
            model.zero_grad(set_to_none=set_to_none)
            step_of(model, x.to(next(model.parameters()).device), step)
        is_ddps = isinstance(models[1], DistributedDataParallel)
        differences.append((difference if is_ddps else difference_to_mean)(*models))
        for optimizer in optimizers:
            optimizer.step()
    return differences
