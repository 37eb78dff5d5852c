"""One benchmark run: every case on every link, in turns."""

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ddp_compile.bench.implementations import COMMUNICATION
from ddp_compile.bench.rank_world import CaseFailedError, RankWorld, RunningCase
from ddp_compile.bench.results import CaseResult
from ddp_compile.bench.settings import Case, Prepared, StepRecord

#: Steps at the start of a turn that are not timed.
NUM_WARM_STEPS = 1
#: The all-reduces from which a link's rate is computed: bytes, and how many.
RATE_BYTES, RATE_REPEATS = 2**25, 5


class Link(Protocol):
    """The link between the ranks."""

    def names(self) -> list[str]:
        """Names of the rates to measure at, in order."""

    def set_rate(self, name: str, running: Sequence[RunningCase]) -> None:
        """Switch to one of them."""

    def sent_bytes(self) -> int | None:
        """Bytes that rank 0 has sent so far; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How much is measured."""

    cases: tuple[Case, ...]  #: what to measure; ``local`` and ``communication`` among them
    rounds: int  #: turns of each case on each link
    steps: int  #: timed steps of a turn
    #: Folder for profilers' traces. If None, only steps are timed: no warm starts, memory or profiles.
    traces: Path | None = None


@dataclass
class RunResult:
    """All figures of a run."""

    cases: list[CaseResult]  #: by case, in the order of the settings
    achieved_gbit: dict[str, float] = field(default_factory=dict)  #: rate of large all-reduces, by link


class BenchmarkRun:
    """Directs the ranks through one run.

    Args:
        world: The ranks.
        link: The link between them.
        settings: How much to measure.
        progress: Called with the name of each of `num_stages` stages before it begins.
        save: Called with the result so far, whenever a case has compiled and all have taken a turn.
    """

    def __init__(
        self,
        world: RankWorld,
        link: Link,
        settings: RunSettings,
        progress: Callable[[str], None],
        save: Callable[[RunResult], None] = lambda result: None,
    ) -> None:
        self.world = world
        self.link = link
        self.settings = settings
        self.progress = progress
        self.save = save
        self.result = RunResult([CaseResult(case) for case in settings.cases])
        self._running: dict[Case, RunningCase] = {}

    @property
    def num_stages(self) -> int:
        """How often ``progress`` is called, if nothing fails."""
        cases = len(self.settings.cases)
        profiles = self.settings.traces is not None
        return cases + len(self.link.names()) * (self.settings.rounds * cases + profiles) + profiles * cases

    def measure(self) -> RunResult:
        """Measure everything; raises a RankDiedError, which ends the run, if a rank's process ended."""
        # In reverse, so that errors of a user's own implementation show before the bounds compile.
        for result in reversed(self.result.cases):
            self.progress(f"compiling {result.case}")
            with self._marking_failure(result):
                running = self.world.start_case(result.case)
                result.cold = _slowest(running.ask("prepare"))
                self._running[result.case] = running
            self.save(self.result)
        for name in self.link.names():
            self._measure_link(name)
        if self.settings.traces is not None:
            # After all timed steps, since profilers slow later ones down.
            for name in self.link.names():
                self._profile_link(name, self.settings.traces)
            for result in self._living():
                self.progress(f"warm start of {result.case}")
                with self._marking_failure(result):
                    self._measure_warm_start(result)
        return self.result

    def _measure_link(self, name: str) -> None:
        self.link.set_rate(name, list(self._running.values()))
        for result in self._living():
            if result.case.implementation == COMMUNICATION and name not in self.result.achieved_gbit:
                with self._marking_failure(result):
                    self._measure_rate(name, self._running[result.case])
        for number in range(self.settings.rounds):
            for result in self._living():
                self.progress(f"{name}: round {number + 1}, {result.case.implementation}")
                with self._marking_failure(result):
                    self._take_turn(result, name)
            self.save(self.result)
        for result in self._living():
            if result.case.implementation != COMMUNICATION:
                with self._marking_failure(result):
                    result.loss = self._running[result.case].ask("loss")[0]

    def _profile_link(self, name: str, traces: Path) -> None:
        self.link.set_rate(name, list(self._running.values()))
        self.progress(f"{name}: profiles")
        for result in self._living():
            if result.case.implementation == COMMUNICATION:
                continue
            with self._marking_failure(result):
                running = self._running[result.case]
                file = re.sub(r"[^\w.-]+", "_", f"trace_{name}_{result.case}") + ".json.gz"
                result.profiles[name] = running.ask("profile", trace=traces / file)[0]
                result.peak_bytes = max(running.ask("peak_bytes"))

    def _take_turn(self, result: CaseResult, name: str) -> None:
        sent_before = self.link.sent_bytes()
        answers = self._running[result.case].ask("time", num_warm=NUM_WARM_STEPS, num_steps=self.settings.steps)
        sent_after = self.link.sent_bytes()
        result.rounds.setdefault(name, []).append([_over_ranks(step) for step in zip(*answers, strict=True)])
        if sent_before is not None and sent_after is not None:
            result.sent_bytes[name] = (sent_after - sent_before) / (NUM_WARM_STEPS + self.settings.steps)

    def _measure_rate(self, name: str, communication: RunningCase) -> None:
        ranks = self.world.settings.num_communicating_ranks
        if ranks > 1:
            answers = communication.ask("time_all_reduce", num_bytes=RATE_BYTES, repeats=RATE_REPEATS)
            slowest = [max(rank.step_s for rank in step) for step in zip(*answers, strict=True)]
            # Sent by each rank of a ring.
            bits = 8 * RATE_BYTES * 2 * (ranks - 1) / ranks
            self.result.achieved_gbit[name] = bits / statistics.median(slowest) / 1e9

    def _measure_warm_start(self, result: CaseResult) -> None:
        if result.case.implementation == COMMUNICATION:
            return
        again = self.world.start_case(result.case, reuse_caches_of=self._running[result.case])
        result.warm = _slowest(again.ask("prepare"))
        again.stop()

    def _living(self) -> list[CaseResult]:
        return [result for result in self.result.cases if result.error is None]

    @contextmanager
    def _marking_failure(self, result: CaseResult) -> Iterator[None]:
        try:
            yield
        except CaseFailedError as error:
            result.error, result.traceback = error.summary, error.traceback
            self._running.pop(result.case, None)


def _slowest(prepared: Sequence[Prepared]) -> Prepared:
    return max(prepared, key=lambda rank: sum(rank.warmup_s))


def _over_ranks(step: Sequence[StepRecord]) -> StepRecord:
    """The same step on all ranks: its length is the slowest rank's, the rest are means."""

    def mean(name: str) -> float:
        return statistics.fmean(getattr(rank, name) for rank in step)

    return StepRecord(
        step_s=max(rank.step_s for rank in step),
        forward_s=mean("forward_s"),
        backward_s=mean("backward_s"),
        optimizer_s=mean("optimizer_s"),
        cpu_s=mean("cpu_s"),
    )
