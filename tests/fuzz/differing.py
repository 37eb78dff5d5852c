"""Programs of two ranks of which rank 1's differs in one thing: exact gradients, or an error that names the difference.

A case runs in a process group of its own, with a short timeout. What must be exact is compared with both ranks'
programs run on plain modules in one process, whose gradients are averaged step by step.
"""

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from beside import gathered
from fuzz.differences import (
    EXACT,
    HANG,
    KINDS,
    NAMED,
    SILENT,
    TWO_MODELS,
    UNNAMED,
    WAITED,
    WIDTH,
    make_net,
    settings_of,
)
from fuzz.verdict import Verdict, quiet
from models import loss_of
from torch import Tensor, nn

from ddp_compile import ddp_compile, shard_optimizer

TIMEOUT_S = 5.0  #: of the case's process group
LIMIT_S = TIMEOUT_S + 10.0  #: within which every rank must be done
RELATIVE = 1e-4


@dataclass(frozen=True)
class DifferingRecipe:
    """What both ranks do, and in what rank 1 differs."""

    kind: str = "nothing"  #: one of `KINDS`
    at: int = 0  #: the step in which rank 1 differs, if it is a matter of the program
    program: tuple[str, ...] = ("train",)  #: one entry for each step: "train", "accumulate" or "evaluate"
    model: str = "mlp"
    split: str = "auto"
    backend: str = "eager"
    compiled: bool = False  #: otherwise the models run eagerly, which takes a tenth of the time
    cap_mib: float = 4e-4
    find_unused: bool = False

    @property
    def differs_at(self) -> int:
        """`at`, or the last step of a program that was made smaller."""
        return min(self.at, len(self.program) - 1)


def differing_recipe_of(seed: int) -> DifferingRecipe:
    """The case of a seed; seeds go through the kinds in turn, so that each has as many."""
    random = Random(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    # Two steps after an agreement point, so that it follows every difference in time.
    num_steps = random.choice((6, 6, 10))
    compiled = random.random() < 0.25 or kind in ("recompiles", "backend", "split", "warm caches")
    return DifferingRecipe(
        kind=kind,
        at=random.randrange(1, (4 if num_steps == 6 else 8) - kind.startswith("optimizer step")),
        program=tuple(random.choices(("train", "accumulate", "evaluate"), (4, 1, 1), k=num_steps)),
        model=random.choice(KINDS[kind].models),
        split=random.choice(("auto", "forward", "backward", "none")),
        backend="aot_eager" if compiled else "eager",
        compiled=compiled,
        cap_mib=random.choice((4e-4, 1e-3, 25.0)),
        find_unused=random.random() < 0.3,
    )


class Seen(NamedTuple):
    gradients: list[list[Tensor | None]]  #: after each reduced backward
    state: list[Tensor]  #: parameters and buffers at the end
    error: str | None
    waited_s: float  #: since its last forward or reduced backward; before that it may have compiled


def batch(rank: int, step: int, call: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 10 * call + rank))


class Program:
    """One rank's program, on a replicated model or on a plain one.

    `run` yields "forward" before each forward that synchronizes, and "reduced" after each backward that does.
    """

    def __init__(self, recipe: DifferingRecipe, rank: int, model: Any, group: dist.ProcessGroup | None) -> None:
        self.recipe, self.rank, self.model, self.group = recipe, rank, model, group
        self.optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        if group is not None and rank == 1 and recipe.kind == "optimizer sharded":
            self.optimizer = shard_optimizer(self.optimizer, model)

    def run(self) -> Iterator[str]:
        for step, entry in enumerate(self.recipe.program):
            here = self.recipe.kind if self.rank == 1 and step == self.recipe.differs_at else ""
            if entry == "evaluate":
                self._evaluate(step)
            if entry == "accumulate":
                self._accumulate(step, 5)
            yield from self._step(step, here)

    def _step(self, step: int, here: str) -> Iterator[str]:
        self._before(step, here)
        if here == "step inside no_sync":
            self._accumulate(step, 0)
        elif here != "step left out":
            yield from self._train(step, here)
        if here != "optimizer step left out":
            self.optimizer.step()
        if here == "optimizer step twice":
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _before(self, step: int, here: str) -> None:
        if here == "evaluates":
            self._evaluate(step)
        elif here == "accumulates":
            self._accumulate(step, 6)
        elif here == "forward in no_sync":
            with self._no_sync():
                self.model(batch(self.rank, step, 7))
        elif here == "forward without backward":
            self.model(batch(self.rank, step, 7))
        elif here == "forward raises, caught":
            with contextlib.suppress(RuntimeError):
                self.model(torch.ones(2, WIDTH + 1))
        elif here == "collective in between" and self.group is not None:
            dist.all_reduce(torch.ones(3), group=self.group)

    def _train(self, step: int, here: str) -> Iterator[str]:
        if here == "evaluation mode":
            self.model.eval()
        rows = 4 + 3 * step if here == "recompiles" else 4
        yield "forward"
        loss = loss_of(self.model(batch(self.rank, step, 0, rows)))
        if here == "two forwards":
            yield "forward"
            loss = loss + loss_of(self.model(batch(self.rank, step, 1)))
        if here == "backward left out":
            return
        loss.backward(retain_graph=here == "backward twice")
        yield "reduced"
        if here == "backward twice":
            loss.backward()
            yield "reduced"
        self.model.train()

    def _accumulate(self, step: int, call: int) -> None:
        with self._no_sync():
            loss_of(self.model(batch(self.rank, step, call))).backward()

    def _evaluate(self, step: int) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(batch(self.rank, step, 8))
        self.model.train()

    def _no_sync(self) -> Any:
        return contextlib.nullcontext() if self.group is None else self.model.no_sync()


def gradients_of(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def state_of(module: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in (*module.parameters(), *module.buffers())]


def train(recipe: DifferingRecipe, rank: int, group: dist.ProcessGroup) -> Seen:
    """What this rank sees of the case."""
    gradients: list[list[Tensor | None]] = []
    state: list[Tensor] = []
    error = None
    progressed = time.monotonic()
    if not (recipe.kind == "warm caches" and rank == 1):
        torch._dynamo.reset()
    try:
        with torch.compiler.set_stance("default" if recipe.compiled else "force_eager"):
            if recipe.kind == TWO_MODELS:
                train_two(recipe, rank, group, gradients)
            else:
                model: Any = ddp_compile(make_net(recipe.model), process_group=group, **settings_of(recipe, rank))
                for event in Program(recipe, rank, model, group).run():
                    progressed = time.monotonic()
                    if event == "reduced":
                        gradients.append(gradients_of(model))
                state = state_of(model)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Seen(gradients, state, error, time.monotonic() - progressed)


def train_two(recipe: DifferingRecipe, rank: int, group: dist.ProcessGroup, gradients: list[Any]) -> None:
    """Two models in one process group, whose backwards rank 1 calls in another order once."""
    models = [ddp_compile(make_net("mlp"), process_group=group, **settings_of(recipe, 0)) for _ in range(2)]
    for step in range(len(recipe.program)):
        losses = [loss_of(model(batch(rank, step, i))) * (i + 1) for i, model in enumerate(models)]
        for loss in reversed(losses) if rank == 1 and step == recipe.differs_at else losses:
            loss.backward()
        gradients.append([*gradients_of(models[0]), *gradients_of(models[1])])
        for model in models:
            model.zero_grad()


@torch.compiler.set_stance("force_eager")
def expected(recipe: DifferingRecipe) -> list[Seen]:
    """What both ranks should see, computed in one process."""
    nets = [make_net(recipe.model) for _ in range(2)]
    programs = [Program(recipe, rank, net, None).run() for rank, net in enumerate(nets)]
    seen = [Seen([], [], None, 0.0) for _ in nets]
    while True:
        buffers: list[list[Tensor]] = []
        events = [_to_reduction(program, rank, nets, buffers) for rank, program in enumerate(programs)]
        if events != [True, True]:
            break
        for ours, theirs in zip(*(net.parameters() for net in nets), strict=True):
            if ours.grad is not None or theirs.grad is not None:
                mean = sum(torch.zeros_like(p) if p.grad is None else p.grad for p in (ours, theirs)) / 2
                ours.grad, theirs.grad = mean.clone(), mean.clone()
        for each, net in zip(seen, nets, strict=True):
            each.gradients.append(gradients_of(net))
    return [each._replace(state=state_of(net)) for each, net in zip(seen, nets, strict=True)]


def _to_reduction(program: Iterator[str], rank: int, nets: list[nn.Module], buffers: list[list[Tensor]]) -> bool:
    """Run to the next reduction; before each forward rank 1 takes the buffers that rank 0 had before its own."""
    for num_forwards, event in enumerate(program):
        if event == "reduced":
            return True
        if rank == 0:
            buffers.append([b.clone() for b in nets[0].buffers()])
        elif buffers:
            for mine, other in zip(nets[1].buffers(), buffers[min(num_forwards, len(buffers) - 1)], strict=True):
                mine.copy_(other)
    return False


def difference(mine: Seen, should: Seen) -> str | None:
    if len(mine.gradients) != len(should.gradients):
        return f"{len(mine.gradients)} iterations in place of {len(should.gradients)}"
    for step, (ours, theirs) in enumerate(zip(mine.gradients, should.gradients, strict=True)):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if (found := _distance(a, b)) > RELATIVE:
                return f"iteration {step + 1}: gradient {i} is {found:.2g} off"
    for i, (x, y) in enumerate(zip(mine.state, should.state, strict=True)):
        if (found := _distance(x, y)) > RELATIVE:
            return f"at the end: tensor {i} of the state is {found:.2g} off"
    return None


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        present = [t for t in (a, b) if t is not None]
        return max((t.abs().max().item() for t in present), default=0.0)
    return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-2)).item()


def verdict_of(recipe: DifferingRecipe, seen: Sequence[Seen]) -> Verdict:
    """The case's verdict from what both ranks saw."""
    kind = KINDS[recipe.kind]
    slow = [
        f"rank {rank} waited for {each.waited_s:.1f} s" for rank, each in enumerate(seen) if each.waited_s > LIMIT_S
    ]
    errors = [each.error for each in seen]
    said = " || ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors))
    if slow:
        return Verdict(HANG, f"{'; '.join(slow)}: {said}")
    if all(error is None for error in errors):
        if kind.promise == NAMED:
            return Verdict(SILENT, "no error on any rank")
        should = expected(recipe)
        found = next((f"rank {r}: {d}" for r, d in enumerate(map(difference, seen, should)) if d is not None), None)
        if found is not None:
            return Verdict(SILENT, found)
        return Verdict(EXACT, "")
    raised = [error for error in errors if error is not None]
    if not all(re.search(kind.names, error, re.IGNORECASE) for error in raised):
        return Verdict(UNNAMED, said)
    return Verdict(NAMED if len(raised) == len(errors) else WAITED, said)


def is_kept(recipe: DifferingRecipe, verdict: Verdict) -> bool:
    """Whether the project's promise for this kind holds; docs/divergence.md says which it is."""
    return verdict.outcome in KINDS[recipe.kind].allowed


def judge_differing(recipes: Sequence[DifferingRecipe]) -> list[Verdict]:
    verdicts = []
    with quiet():
        for recipe in recipes:
            group: Any = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
            mine = train(recipe, dist.get_rank(), group)
            verdicts.append(verdict_of(recipe, gathered(mine)))
    return verdicts
