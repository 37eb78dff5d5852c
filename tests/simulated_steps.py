"""Reports of steps that were not measured but computed: one link, transfers in order, known computation times."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddp_compile.report.steps import BucketInfo, RankStep, Step, StepReport, Transfer

MIB = 2**20


@dataclass(kw_only=True)
class Simulation:
    """A training run whose transfers share one link.

    Args:
        buckets: Names of the parameters of each bucket, and its bytes, in launch order.
        ready: When each bucket is ready, in seconds since the step began.
        latency_s: Of a transfer.
        bytes_per_s: Of the link.
        forward_s: When the backward begins.
        late: Seconds by which ranks begin their backward later.
        late_in: Share of the steps in which they do.
        gathered: Whether buckets are gathered in the forward, the last one of the plan first, each just before its part
            of the forward.
        jitter: Each computation is longer by up to this share.
    """

    buckets: Sequence[tuple[Sequence[str], int]]
    ready: Sequence[float]
    ranks: int = 2
    steps: int = 20
    latency_s: float = 0.001
    bytes_per_s: float = 1e9
    forward_s: float = 0.02
    late: Mapping[int, float] = field(default_factory=dict)
    late_in: float = 1.0
    gathered: bool = False
    jitter: float = 0.0
    model: str = "GPT"
    clock_error_s: float = 0.0001

    def run(self) -> StepReport:
        dice = random.Random(0)
        infos = [
            BucketInfo(index=i, names=tuple(names), num_bytes=num_bytes, dtype="float32")
            for i, (names, num_bytes) in enumerate(self.buckets)
        ]
        steps = [self._step(number, dice) for number in range(1, self.steps + 1)]
        return StepReport(
            model=self.model,
            algorithm="AllReduce",
            plan_digest="0" * 16,
            buckets=tuple(infos),
            steps=steps,
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
