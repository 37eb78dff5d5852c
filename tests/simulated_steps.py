"""Reports of steps that were not measured but computed: one link, transfers in order, known computation times."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_compile.plan.spec import BucketPlan, BucketSpec, GradientSpec
from ddp_compile.report.step_report import StepReport
from ddp_compile.report.steps import RankStep, Step, Transfer

MIB = 2**20


def plan_of(buckets: Sequence[tuple[Sequence[str], int]]) -> BucketPlan:
    """A plan of these buckets: names of float32 gradients of one size, and bytes."""
    specs, index = [], 0
    for number, (names, num_bytes) in enumerate(buckets):
        numel = num_bytes // 4 // len(names)
        gradients = [GradientSpec(index + i, name, numel, "float32", "cpu") for i, name in enumerate(names)]
        specs.append(BucketSpec(number, tuple(gradients), num_bytes, frame=0, layout="ddp"))
        index += len(names)
    return BucketPlan(tuple(specs))


@dataclass(kw_only=True)
class Simulation:
    """A training run whose transfers share one link."""

    buckets: Sequence[tuple[Sequence[str], int]]  # names of the parameters of each, and its bytes, in launch order
    ready: Sequence[float]  # when each bucket is, in seconds since the step began
    ranks: int = 2
    steps: int = 20
    latency_s: float = 0.001  # of a transfer
    bytes_per_s: float = 1e9  # of the link
    forward_s: float = 0.02  # when the backward begins
    late: Mapping[int, float] = field(default_factory=dict)  # seconds by which ranks begin their backward later
    late_in: float = 1.0  # share of the steps in which they do
    gathered: bool = False  # in the forward, the plan's last bucket first, each just before its part of the forward
    jitter: float = 0.0  # each computation is longer by up to this share
    model: str = "GPT"
    clock_error_s: float = 0.0001

    def run(self) -> StepReport:
        dice = random.Random(0)
        steps = [self._step(number, dice) for number in range(1, self.steps + 1)]
        return StepReport(
            model=self.model,
            algorithm="gradient all-reduce",
            plan=plan_of(self.buckets),
            steps=tuple(steps),
            clock_error_s=self.clock_error_s,
            device="cpu",
        )

    def _step(self, number: int, dice: random.Random) -> Step:
        is_late = number <= self.late_in * self.steps
        forwards = [self._forward(rank) for rank in range(self.ranks)]
        ready = []
        for rank, (now, _) in enumerate(forwards):
            begin = now + (self.late.get(rank, 0.0) if is_late else 0.0)
            slower = 1 + self.jitter * dice.random()
            ready.append([begin + (each - self.forward_s) * slower for each in self.ready])
        free, done = 0.0, []
        for i, (_, num_bytes) in enumerate(self.buckets):
            free = max(free, *(times[i] for times in ready)) + self._transfer_s(num_bytes)
            done.append(free)
        return Step(
            number=number,
            ranks=tuple(
                _rank_step(rank, [num for _, num in self.buckets], ready[rank], done, forwards[rank])
                for rank in range(self.ranks)
            ),
        )

    def _forward(self, rank: int) -> tuple[float, list[Transfer]]:
        """When it ends, and the gathers that it waits for: launched before the step, the last of the plan first."""
        now, free, gathers = 0.0, 0.0, []
        for i in reversed(range(len(self.buckets)) if self.gathered else []):
            num_bytes = self.buckets[i][1]
            free += self._transfer_s(num_bytes)
            gathers.append(_transfer(i, "gather", num_bytes, launched=-0.0005, done=free, asked=now))
            now = max(now, free) + self.forward_s / len(self.buckets)
        return (now if self.gathered else self.forward_s), gathers

    def _transfer_s(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


def _rank_step(
    rank: int,
    sizes: Sequence[int],
    ready: Sequence[float],
    done: Sequence[float],
    forward: tuple[float, list[Transfer]],
) -> RankStep:
    now, (forward_s, gathers) = ready[-1], forward
    reduces = []
    for i, num_bytes in enumerate(sizes):
        reduces.append(_transfer(i, "reduce", num_bytes, launched=ready[i], done=done[i], asked=now))
        now = max(now, done[i])
    return RankStep(rank=rank, began=0.0, backward_began=forward_s, ended=now, transfers=(*gathers, *reduces))


def _transfer(bucket: int, kind: str, num_bytes: int, *, launched: float, done: float, asked: float) -> Transfer:
    return Transfer(
        bucket=bucket,
        kind=kind,  # type: ignore[arg-type]
        num_bytes=num_bytes,
        ready=launched,
        launched=launched,
        launch_returned=launched,
        done=done,
        waited_from=asked if done > asked else None,
        waited_until=done if done > asked else None,
    )


def six_buckets(**settings: object) -> StepReport:
    """Five buckets that are hidden, and a last one of 40 MiB that is not."""
    buckets = [
        ([f"blocks.{4 - i}.{name}" for name in ("attn.weight", "mlp.weight", "norm.weight")], 4 * MIB) for i in range(5)
    ]
    buckets.append((["embedding.weight", "positions.weight", "blocks.0.norm.weight", "blocks.0.norm.bias"], 40 * MIB))
    simulation = Simulation(buckets=buckets, ready=[0.03, 0.04, 0.05, 0.06, 0.07, 0.12])
    for name, value in settings.items():
        setattr(simulation, name, value)
    return simulation.run()


def many_buckets() -> StepReport:
    """60 buckets, 8 ranks, 20 steps, gathers and a late rank: as large as a page has to be able to hold."""
    buckets = [([f"model.layers.{i}.mlp.experts.down_proj_{j}.weight" for j in range(9)], 25 * MIB) for i in range(60)]
    return Simulation(
        buckets=buckets,
        ready=[0.2 + 0.01 * i for i in range(60)],
        ranks=8,
        bytes_per_s=2.4e9,
        forward_s=0.18,
        late={3: 0.012},
        late_in=0.9,
        gathered=True,
        jitter=0.02,
    ).run()


def reduce(
    bucket: int, launched: float, done: float | None, waited_from: float | None, until: float | None, **other: Any
) -> Transfer:
    """A reduction whose launch takes no time."""
    fields = {"kind": "reduce", "num_bytes": 400, "ready": launched, "launch_returned": launched, **other}
    return Transfer(bucket=bucket, launched=launched, done=done, waited_from=waited_from, waited_until=until, **fields)


def rank_step(rank: int, *transfers: Transfer, ended: float = 0.1, drained_s: float = 0.0) -> RankStep:
    return RankStep(rank=rank, began=0.0, backward_began=0.03, ended=ended, transfers=transfers, drained_s=drained_s)


def step_with_late_rank(number: int = 7) -> Step:
    """Rank 3 launches bucket 1 20 ms later than rank 2; the transfers take 30 ms and 10 ms."""
    return Step(
        number=number,
        ranks=(
            rank_step(2, reduce(0, 0.04, 0.07, 0.06, 0.07), reduce(1, 0.05, 0.09, 0.07, 0.09), ended=0.091),
            rank_step(3, reduce(0, 0.04, 0.07, 0.07, 0.07), reduce(1, 0.07, 0.09, 0.07, 0.09), ended=0.092),
        ),
    )


def report_of(*steps: Step) -> StepReport:
    return StepReport(
        model="Mlp",
        algorithm="gradient all-reduce",
        plan=plan_of([([f"layers.{i}.weight"], 400) for i in range(2)]),
        steps=steps,
        clock_error_s=25e-6,
        device="cpu",
    )
