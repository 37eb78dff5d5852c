"""One benchmark run: every case on every link, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from ddp_compile.bench.implementations import COMMUNICATION
from ddp_compile.bench.rank_world import CaseFailedError, RankWorld, RunningCase
from ddp_compile.bench.results import CaseResult
from ddp_compile.bench.settings import Case, Prepared, StepRecord

#: Steps at the start of a turn that are not timed.
NUM_WARM_STEPS = 1
MESSAGE_BYTES = tuple(2**exponent for exponent in range(11, 26, 2))
#: A size is repeated for about this long, with a lower and an upper bound on how often.
MESSAGE_S = 0.4
MESSAGE_REPEATS = (5, 200)


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
    """How much is measured.

    Args:
        cases: What to measure; ``local`` and ``communication`` among them.
        rounds: Turns of each case on each link.
        steps: Timed steps of a turn.
        only_steps: Leave out warm starts, memory, profiles and message sizes.
    """

    cases: tuple[Case, ...]
    rounds: int
    steps: int
    only_steps: bool = False


@dataclass
class RunResult:
    """All figures of a run.

    Args:
        cases: By case, in the order of the settings.
        achieved_gbit: Rate of all-reduces of the largest message, by link.
        messages: For each link and message size in bytes, the timed all-reduces.
    """

    cases: list[CaseResult]
    achieved_gbit: dict[str, float] = field(default_factory=dict)
    messages: dict[str, dict[int, list[StepRecord]]] = field(default_factory=dict)


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
        stages_of_link = self.settings.rounds * cases + (0 if self.settings.only_steps else 1)
        return cases + len(self.link.names()) * stages_of_link + (0 if self.settings.only_steps else cases)

    def measure(self) -> RunResult:
        """Measure everything.

        Raises:
            RankDiedError: A rank's process ended; the run is over.
        """
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
        if not self.settings.only_steps:
            # After all timed steps, since hooks and profilers slow later ones down.
            for name in self.link.names():
                self._profile_link(name)
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

    def _profile_link(self, name: str) -> None:
        self.link.set_rate(name, list(self._running.values()))
        self.progress(f"{name}: message sizes and profiles")
        for result in self._living():
            with self._marking_failure(result):
                running = self._running[result.case]
                if result.case.implementation != COMMUNICATION:
                    result.profiles[name] = running.ask("profile")[0]
                    result.peak_bytes = max(running.ask("peak_bytes"))
                elif name not in self.result.messages:
                    self._measure_messages(name, running)

    def _take_turn(self, result: CaseResult, name: str) -> None:
        sent_before = self.link.sent_bytes()
        answers = self._running[result.case].ask("time", num_warm=NUM_WARM_STEPS, num_steps=self.settings.steps)
        sent_after = self.link.sent_bytes()
        result.rounds.setdefault(name, []).append([_over_ranks(step) for step in zip(*answers, strict=True)])
        if sent_before is not None and sent_after is not None:
            result.sent_bytes[name] = (sent_after - sent_before) / (NUM_WARM_STEPS + self.settings.steps)

    def _measure_messages(self, name: str, communication: RunningCase) -> None:
        times = self.result.messages.setdefault(name, {})
        for num_bytes in MESSAGE_BYTES:
            least, most = MESSAGE_REPEATS
            first = self._time_all_reduces(communication, num_bytes, least)
            once_s = statistics.median(step.step_s for step in first)
            repeats = min(most, max(least, round(MESSAGE_S / once_s)))
            times[num_bytes] = self._time_all_reduces(communication, num_bytes, repeats) if repeats > least else first

    def _measure_rate(self, name: str, communication: RunningCase) -> None:
        ranks = self.world.settings.num_communicating_ranks
        if ranks > 1:
            times = self._time_all_reduces(communication, MESSAGE_BYTES[-1], MESSAGE_REPEATS[0])
            # Sent by each rank of a ring.
            bits = 8 * MESSAGE_BYTES[-1] * 2 * (ranks - 1) / ranks
            self.result.achieved_gbit[name] = bits / statistics.median(step.step_s for step in times) / 1e9

    def _time_all_reduces(self, communication: RunningCase, num_bytes: int, repeats: int) -> list[StepRecord]:
        answers = communication.ask("time_all_reduce", num_bytes=num_bytes, repeats=repeats)
        return [_over_ranks(step) for step in zip(*answers, strict=True)]

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
