"""Parameters whose gradient autograd leaves undefined, against DistributedDataParallel."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import difference, own_batch, pair
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ddp_compile import ddp_compile
from ddp_compile.errors import GradientArrivalError

pytestmark = pytest.mark.usefixtures("each_split")

WIDTH = 5


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stops: bool) -> Tensor:
        ctx.stops = stops
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return None if ctx.stops else gradient, None


class Stopped(nn.Module):
    """A head whose function returns no gradient when requested."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.end = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    @torch.compiler.disable
    def stop(self, x: Tensor, stops: bool) -> Tensor:
        return Stop.apply(self.head(x), stops)

    def forward(self, x: Tensor, stops: bool) -> Tensor:
        return self.end(torch.tanh(self.body(x)) + self.stop(x, stops))


class Read(nn.Module):
    """Parameters that the graph reads, though no gradient comes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.chooser = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, stops: bool) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return (torch.tanh(self.student(x)) - target) * self.scale.detach() + self.chooser(x).argmax(1, keepdim=True)


def look_at(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    return module


def differences(
    make: Callable[[], nn.Module],
    program: str,
    zeroed: bool = False,
    hooked: bool = False,
    through_compile: bool = False,
    **options: Any,
) -> list[float]:
    """After each backward of a program the largest difference of two gradients.

    A letter says whether the gradient is "d"efined, "u"ndefined, or undefined on some "r"ank, another one in each step;
    it is reduced if the letter is a capital one. ``through_compile`` compiles DistributedDataParallel as well.
    """
    torch._dynamo.reset()
    models = pair(lambda: look_at(make()) if hooked else make(), options, bucket_cap_mb=2e-4)
    if through_compile:
        models = models[0], torch.compile(models[1], backend="aot_eager")
    worst = []
    for step, letter in enumerate(program):
        is_undefined = {"d": False, "u": True, "r": (dist.get_rank() + step) % 2 == 0}[letter.lower()]
        for model in models:
            model.zero_grad(set_to_none=not zeroed)
            with contextlib.nullcontext() if letter.isupper() else model.no_sync():
                model(own_batch(step, WIDTH), is_undefined).square().sum().backward()
        gradients = [p.grad for p in models[0].parameters()]
        assert letter != "U" or any(gradient is None or not gradient.any() for gradient in gradients)
        worst.append(difference(*models))
    return worst


CASES: list[dict[str, Any]] = [
    {"program": "DDUU", "zeroed": True, "hooked": True},
    {"program": "DDUU", "static_graph": True, "gradient_as_bucket_view": False},
    {"program": "RRRR", "zeroed": True, "find_unused_parameters": True},
    {"program": "dU"},
    {"program": "DdUuDU", "hooked": True},
]


@on_ranks(2)
def test_function_without_gradient() -> None:
    found = [differences(Stopped, **case) for case in CASES]
    assert max(map(max, found)) < 1e-6, found


@on_ranks(2)
def test_parameter_read_without_gradient() -> None:
    # Eager DistributedDataParallel waits for unreachable parameters, unless find_unused_parameters is set.
    every = ({}, {"find_unused_parameters": True}, {"static_graph": True})
    found = [differences(Read, "UUUU", through_compile=not flags, **flags) for flags in every]
    assert max(map(max, found)) < 1e-6, found


@pytest.mark.parametrize(
    ("hooked", "begins", "noticed"), [("own", 0, 0), ("own", 2, 2), ("node", 0, 0), ("later", 0, 0), ("later", 2, 3)]
)
def test_hook_takes_gradient_away(hooked: str, begins: int, noticed: int, single_rank_group: None) -> None:
    """A hook on the parameter, on its node, or on a later parameter; after the first step that is noticed too late."""
    model = ddp_compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), backend="aot_eager")
    step = 0

    def take_away(*_: object) -> None:
        if step >= begins:
            model[1].weight.grad = None

    if hooked == "node":
        get_gradient_edge(model[1].weight).node.register_hook(take_away)  # alive as long as the replicated module
    else:
        (model[1].weight if hooked == "own" else model[1].bias).register_post_accumulate_grad_hook(take_away)
    while step < noticed:
        model(torch.ones(2, WIDTH)).sum().backward()
        step += 1
    with pytest.raises(GradientArrivalError, match=r"1\.weight was set to None before it was averaged"):
        model(torch.ones(2, WIDTH)).sum().backward()


def test_static_graph_and_undefined(single_rank_group: None) -> None:
    model = ddp_compile(Stopped(), backend="eager", static_graph=True)
    model(torch.ones(2, WIDTH), True).sum().backward()
    with pytest.raises(GradientArrivalError, match=r"head.* it got none in the first iteration, and static_graph=True"):
        model(torch.ones(2, WIDTH), False).sum().backward()
