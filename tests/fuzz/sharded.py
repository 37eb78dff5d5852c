"""Random parameters and programs: one or two sharded optimizers beside such that are not sharded, bit for bit.

With two ranks docs/sharded_optimizer.md promises the same bits, except for a few differences by rounding. Where two of
these would occur, the reference follows the sharded optimizer: it adds up the means of several backwards, and it clips
by the norm that the sharded optimizer found. That norm is compared with the norm in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from fuzz.training import Observation
from fuzz.verdict import FAILED, PASSED, Groups, Verdict, difference_of_kinds, quiet, worst_of
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grads_with_norm_

from ddp_compile import ddp_compile, shard_optimizer

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.05),
    "sgd, nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True, foreach=True),
    "sgd, fused": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, fused=True),
    "adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, eps=1e-4),
    "adam, fused": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.01, eps=1e-4, fused=True),
    "adam, lr in a tensor": lambda p: optim.Adam(p, lr=torch.tensor(0.01), eps=1e-4),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, eps=1e-4, foreach=True),
    "adamw, fused": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True, eps=1e-4, fused=True),
    "adamax": lambda p: optim.Adamax(p, lr=0.01, eps=1e-4),
    "nadam": lambda p: optim.NAdam(p, lr=0.01, eps=1e-4),
    "radam": lambda p: optim.RAdam(p, lr=0.01, eps=1e-4),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, eps=1e-3),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.05, lr_decay=0.01, eps=1e-4),
    "adagrad, fused": lambda p: optim.Adagrad(p, lr=0.05, lr_decay=0.01, eps=1e-4, fused=True),
    "adadelta": lambda p: optim.Adadelta(p, lr=1.0, eps=1e-4),
    "asgd": lambda p: optim.ASGD(p, lr=0.05, t0=1),
    "asgd, foreach": lambda p: optim.ASGD(p, lr=0.05, t0=1, foreach=True),
}
# Beside one of these. They take whole parameters: Muon the matrices, Adafactor and AdamW every other parameter.
SECOND: dict[str, Callable[[Any], optim.Optimizer]] = {
    "muon": lambda p: optim.Muon(p, lr=0.02),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.05),
    "adamw": lambda p: optim.AdamW(p, lr=0.02, eps=1e-4),
}
SHAPES = ((0,), (0, 3), (), (1,), (3,), (7,), (31,), (33,), (5, 13), (17, 9), (64,), (40, 40), (101, 7), (3, 0, 2))
DTYPES = 4 * [("float32",)] + [("float64",), ("bfloat16",), ("float16",), ("float32", "bfloat16")]
LOW = ("bfloat16", "float16")
# Of a norm. In low precision torch rounds the norm of each tensor, here of each piece. In float32 torch's norm of order
# 1 is up to 2e-6 off for 1,600 normally distributed values.
TOLERANCES = {"float64": 1e-12, "float32": 5e-6, "float16": 2e-3, "bfloat16": 1e-2}


@dataclass(frozen=True)
class ShardedRecipe:
    """One case; see `fuzz.recipe.Recipe`."""

    #: Shape, dtype, and whether a matrix lies in the memory of its transpose.
    parameters: tuple[tuple[tuple[int, ...], str, bool], ...] = (((33,), "float32", False),)
    program: tuple[str, ...] = ("train", "step", "zero")  # what is done, in order: names in `ACTIONS`
    optimizer: str = "sgd"  # in `OPTIMIZERS`
    cap_mib: float = 25.0  # of every bucket
    second: str = ""  # in `SECOND`
    two_groups: bool = False  # every other parameter is in a second group
    find_unused: bool = False  # find_unused_parameters, and some of them are
    view: bool = True  # gradient_as_bucket_view


def sharded_recipe_of(seed: int) -> ShardedRecipe:
    random = Random(seed)
    dtypes = random.choice(DTYPES)
    optimizer = random.choice(list(OPTIMIZERS))
    is_fused_sgd = optimizer == "sgd, fused"  # which torch 2.13 refuses, or steps wrongly, in some of these cases
    if is_fused_sgd and set(dtypes) & set(LOW):
        dtypes = ("float32",)
    parameters = [
        (random.choice(SHAPES), random.choice(dtypes), random.random() < 0.2) for _ in range(random.randint(1, 7))
    ]
    # While some parameter of a group has no momentum, torch 2.13 steps the others by another formula, which rounds
    # differently in low precision. With shards a group has other parameters.
    has_two_formulas = optimizer == "sgd, nesterov" and any(dtype in LOW for dtype in dtypes)
    return ShardedRecipe(
        parameters=(((33,), dtypes[0], False), *parameters),
        program=_program(random, drops=not (is_fused_sgd or has_two_formulas)),
        optimizer=optimizer,
        cap_mib=random.choice((1e-5, 0.0005, 0.002, 25.0)),
        second=random.choice(("", "", *SECOND)),
        two_groups=random.random() < 0.3,
        find_unused=not (is_fused_sgd or has_two_formulas) and random.random() < 0.2,
        view=random.random() < 0.7,
    )


def _program(random: Random, drops: bool) -> tuple[str, ...]:
    def maybe(probability: float, *actions: str) -> list[str]:
        return [random.choice(actions)] if random.random() < probability else []

    program = maybe(0.3, "load")
    for _ in range(random.randint(2, 5)):
        program += [random.choice(("train", "train", "accumulate")), *maybe(0.25, "train")]
        program += [*maybe(0.2 if drops else 0.0, "drop"), *maybe(0.3, "clip 1", "clip 2", "clip 3", "clip inf")]
        program += ["step", *maybe(0.9, "zero", "zero in place")]
        program += [*maybe(0.4, "schedule"), *maybe(0.2, "reload"), *maybe(0.15, "edit")]
    return (*program, *maybe(0.15, "unwrap"))


class Net(nn.Module):
    """Parameters, and a loss of them and of inputs of their shapes."""

    def __init__(self, recipe: ShardedRecipe) -> None:
        super().__init__()
        for number, (shape, dtype, is_transposed) in enumerate(recipe.parameters):
            values = torch.randn(shape, dtype=torch.float64).to(getattr(torch, dtype))
            values = values.t().contiguous().t() if is_transposed and len(shape) == 2 else values
            self.register_parameter(f"p{number}", nn.Parameter(values))

    def forward(self, inputs: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(self.parameters(), inputs, strict=True)
        terms = [(p.double() * x).sum() + 0.1 * (p * p * p).double().sum() for p, x in pairs if x is not None]
        return torch.stack(terms).sum()


class Training:
    """One side of a case; the sharded one gets no ``norms``, the other one those that the first has clipped by."""

    def __init__(self, recipe: ShardedRecipe, group: dist.ProcessGroup, norms: list[Tensor] | None) -> None:
        torch.manual_seed(3)
        self.recipe, self.rank, self.norms, self.position = recipe, group.rank(), norms, 0
        self.net = Net(recipe)
        self.parameters = list(self.net.parameters())
        self.model: Any = ddp_compile(
            self.net,
            process_group=group,
            bucket_cap_mb=recipe.cap_mib,
            gradient_as_bucket_view=recipe.view,
            find_unused_parameters=recipe.find_unused,
            backend="eager",
        )
        self.optimizers = self.optimizers_of(self.parameters)
        if norms is None:
            shard_optimizer(self.optimizers, self.model)
        self.schedules = [optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in self.optimizers]

    def optimizers_of(self, parameters: list[nn.Parameter]) -> list[optim.Optimizer]:
        of_second = self._of_second(parameters) if self.recipe.second else []
        rest = [p for p in parameters if not any(p is other for other in of_second)]
        groups = [{"params": rest[::2]}, {"params": rest[1::2], "weight_decay": 0.05}]
        first = OPTIMIZERS[self.recipe.optimizer](groups if self.recipe.two_groups else rest)
        return [first, SECOND[self.recipe.second](of_second)] if of_second else [first]

    def _of_second(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        if self.recipe.second == "muon":
            return [p for p in parameters if p.dim() == 2 and p.numel()]
        every_other = [p for p in parameters[1::2] if p.numel()]
        if self.recipe.second == "adafactor":  # a group of several dtypes is refused
            return [p for p in every_other if p.dtype == every_other[0].dtype]
        return every_other

    def each(self, do: Callable[[optim.Optimizer], Any]) -> None:
        for optimizer in self.optimizers:
            do(optimizer)

    def backward(self) -> None:
        generator = torch.Generator().manual_seed(1000 * self.position + self.rank)
        inputs = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in self.parameters]
        is_used = [not self.recipe.find_unused or number % 3 != self.position % 3 for number in range(len(inputs))]
        is_used[0] = True
        self.model([x if used else None for x, used in zip(inputs, is_used, strict=True)]).backward()

    def do(self, action: str) -> Observation:
        found: Observation = {}
        ACTIONS[action](self, found)
        self.position += 1
        if action in ("train", "accumulate", "drop"):
            return {f"gradient of {name}": gradient for name, gradient in self.model.full_gradients().items()}
        found |= {name: p.detach().clone() for name, p in self.net.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            for place, state in optimizer.state_dict()["state"].items():
                named = {f"state {key} of p{place} of optimizer {number}": value for key, value in state.items()}
                found |= {name: torch.as_tensor(value).clone() for name, value in named.items()}
        return found


def train(t: Training, _found: Observation, is_accumulated: bool = False) -> None:
    means = [] if t.norms is None else [(p, p.grad) for p in t.parameters if p.grad is not None]
    for parameter, _ in means:
        parameter.grad = None
    if is_accumulated:
        with t.model.no_sync():
            t.backward()
        t.position += 1
    t.backward()
    for parameter, mean in means:
        parameter.grad = mean if parameter.grad is None else mean + parameter.grad


def clip(t: Training, found: Observation, order: float) -> None:
    if t.norms is None:
        found["norm"] = t.model.clip_grad_norm_(0.3, order)
        return
    gradients = [p.grad.double().flatten() for p in t.parameters if p.grad is not None and p.numel()]
    found["norm"] = torch.linalg.vector_norm(torch.cat(gradients), order) if gradients else torch.tensor(0.0)
    clip_grads_with_norm_(t.parameters, 0.3, t.norms.pop(0))


def load(t: Training, _found: Observation) -> None:
    """What an optimizer without shards has after two steps."""
    others = [nn.Parameter(p.detach().clone()) for p in t.parameters]
    optimizers = t.optimizers_of(others)
    for _ in range(2):
        for parameter in others:
            parameter.grad = torch.full_like(parameter, 0.1)
        for optimizer in optimizers:
            optimizer.step()
    for mine, optimizer in zip(t.optimizers, optimizers, strict=True):
        mine.load_state_dict(optimizer.state_dict())


def drop(t: Training, _found: Observation) -> None:
    t.parameters[0].grad = None


@torch.no_grad()
def edit(t: Training, _found: Observation) -> None:
    t.parameters[-1].mul_(0.75)


ACTIONS: dict[str, Callable[[Training, Observation], Any]] = {
    "train": train,
    "accumulate": partial(train, is_accumulated=True),
    **{f"clip {order}": partial(clip, order=float(order)) for order in ("1", "2", "3", "inf")},
    "load": load,
    "drop": drop,
    "edit": edit,
    "step": lambda t, _: t.each(lambda optimizer: optimizer.step()),
    "zero": lambda t, _: t.each(lambda optimizer: optimizer.zero_grad()),
    "zero in place": lambda t, _: t.model.zero_grad(set_to_none=False),
    "schedule": lambda t, _: [schedule.step() for schedule in t.schedules],
    "reload": lambda t, _: t.each(lambda optimizer: optimizer.load_state_dict(optimizer.state_dict())),
    "unwrap": lambda t, _: t.model.unwrap(),
}


def observe(recipe: ShardedRecipe, groups: Groups, norms: list[Tensor] | None) -> list[Observation]:
    """What can be seen after each action; ends with the action that raised."""
    seen: list[Observation] = []
    try:
        training = Training(recipe, groups.current, norms)
        seen.extend(training.do(action) for action in recipe.program)
    except Exception as error:
        seen.append({"raised": f"{type(error).__name__}: {error}"})
    groups.renew_after("raised" in seen[-1])
    return seen


def difference(recipe: ShardedRecipe, ours: Sequence[Observation], theirs: Sequence[Observation]) -> str:
    """The first one in words; empty if there is none."""
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        for name in sorted(mine.keys() | other.keys()):
            values = mine.get(name), other.get(name)
            if name == "raised":
                found = f"raised {str(values[0])!r} in place of {str(values[1])!r}"
            elif name == "norm" and None not in values:
                tolerance = max(TOLERANCES[dtype] for _, dtype, _ in recipe.parameters)
                is_close = torch.allclose(values[0].double(), values[1].double(), rtol=tolerance, atol=0)
                found = "" if is_close else f"is {values[0].item()}, and should be {values[1].item()}"
            else:
                found = _difference_of_bits(*values)
            if found:
                return f"{position} {recipe.program[position]}: {name}: {found}"
    return ""


def _difference_of_bits(ours: Tensor | None, theirs: Tensor | None) -> str:
    if ours is None or theirs is None or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return difference_of_kinds(ours, theirs)
    differ = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    return f"{int(differ.sum())} of {differ.numel()} elements differ" if differ.any() else ""


def judge(recipe: ShardedRecipe, groups: Groups) -> Verdict:
    """The case's verdict, the same on every rank; called on all ranks at once."""
    ours = observe(recipe, groups, None)
    theirs = observe(recipe, groups, [each["norm"] for each in ours if "norm" in each])
    found = difference(recipe, ours, theirs)
    return worst_of(Verdict(FAILED if found else PASSED, found))


@torch.compiler.set_stance("force_eager")
def judge_sharded(recipes: Sequence[ShardedRecipe]) -> list[Verdict]:
    with quiet():
        groups = Groups()
        return [judge(recipe, groups) for recipe in recipes]
