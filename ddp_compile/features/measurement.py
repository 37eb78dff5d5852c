"""``model.measure()``: records some steps on every rank, and makes one report of them.

Note [When records are exchanged]
A report needs the records of all ranks. They are exchanged in the backward that ends the last step, where every rank is
and nothing is under way, so that later one rank alone can look at the report. A measurement without an end is exchanged
in `Measurement.stop`. While it records, nothing more is sent than without it.

One backward may reach several models, and they may come to their ends in another order on each rank. So the exchanges
come when all of them have, in the order in which the measurements began, which is the same on every rank. So does what
else needs every rank at the end of an iteration; see `when_pass_ends`.
"""

from __future__ import annotations

import itertools
import json
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.features.replica import Replica
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.report.explanation import Explanation
from ddp_compile.report.step_report import StepReport
from ddp_compile.report.steps import RankStep, Step, Transfer, union_length
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.host_clock import Offset, exchange_bytes, measure_offsets
from ddp_compile.runtime.comm.process_groups import host_group
from ddp_compile.runtime.comm.step_records import NO_RECORDS, RawStep, RawTransfer, StepRecords
from ddp_compile.runtime.comm.streams import work_blocks_host

#: How many steps a measurement without an end keeps.
MOST_KEPT = 100

Result = TypeVar("Result")

_numbers = itertools.count()


class _Due(threading.local):
    """What comes at the end of the backward pass that this thread ends, with its number."""

    def __init__(self) -> None:
        self.graph_task = -1
        self.methods: list[tuple[int, weakref.WeakMethod[Callable[[], None]]]] = []


_due = _Due()


def next_number() -> int:
    """A number for `when_pass_ends`. Every rank has to take its numbers for the same things in the same order."""
    return next(_numbers)


def when_pass_ends(number: int, method: Callable[[], None]) -> None:
    """Call a method that needs every rank when the backward pass has ended; see Note [When records are exchanged].

    At once outside of a backward, where the user ends each model's step.

    Args:
        number: Methods with smaller ones come first.
        method: A bound method, whose object this does not keep alive.
    """
    graph_task = torch_internals.current_graph_task_id()
    if graph_task == -1:
        method()
        return
    if _due.graph_task != graph_task:
        _due.graph_task, _due.methods = graph_task, []  # those of a pass that raised are dropped
        # Twice, so that it comes after collectives that others queue when the pass ends; see `DelayedAllReduce`.
        torch_internals.queue_backward_callback(lambda: torch_internals.queue_backward_callback(_call_what_is_due))
    _due.methods.append((number, weakref.WeakMethod(method)))


def _call_what_is_due() -> None:
    due, _due.graph_task, _due.methods = _due.methods, -1, []
    for _, reference in sorted(due, key=lambda each: each[0]):
        if (method := reference()) is not None:
            method()


def begin_measurement(
    replica: Replica, model: str, steps: int | None, explain: Callable[[], Explanation | None]
) -> Measurement:
    """``model.measure()``: begin a measurement, on every rank between the same two steps.

    Args:
        model: Name of the model's class.
        steps: How many steps to record; None for any number.
        explain: Returns what ``model.explain()`` says; must not keep the model alive.

    Raises:
        ValueError: ``steps`` is not a positive integer.
        ReplicationError: It cannot begin now.
        RanksDifferError: Another rank measures other steps, or none within the process group's timeout.
    """
    _refuse(replica, steps)
    first = replica.reducer.iteration_number + replica.reducer.is_within_iteration
    replica.monitor.agree_on_measurement(f"measure(steps={steps})", f" from iteration {first} on")
    return Measurement(replica, model, steps, first, explain=explain)


class Measurement:
    """A measurement under way, or its report; ``model.measure()`` returns it.

    As a context manager it stops at the end, without a report if an exception leaves it.

    Args:
        model: Name of the model's class.
        steps: How many steps to record; None for any number.
        first: Number of the first iteration to record; the same on every rank.
        explain: Returns what ``model.explain()`` says, or None; must not keep the model alive.
        then: Called on every rank after the records were exchanged.
    """

    def __init__(
        self,
        replica: Replica,
        model: str,
        steps: int | None,
        first: int,
        *,
        explain: Callable[[], Explanation | None] = lambda: None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        reducer, group, device = replica.reducer, replica.process_group, replica.device
        self._replica = weakref.ref(replica)  # users may keep the report for longer than the model
        self._model, self._steps, self._device, self._explain, self._then = model, steps, device, explain, then
        self._ranks, self._rank_in_group = dist.get_process_group_ranks(group), group.rank()
        self._report: StepReport | None = None
        self._is_over = False
        self._number = next_number()
        self._hosts: Any = host_group(group, device, own=False)
        self._offsets = _among_ranks(measure_offsets, *self._hosts)
        self._records = StepRecords(
            device,
            reducer.iteration_number,
            first,
            steps,
            steps or MOST_KEPT,
            work_blocks_host(group, device),
            _exchange_of(self),
        )
        reducer.record_into(self._records)

    @property
    def is_over(self) -> bool:
        """Whether it records no more."""
        return self._is_over or self._replica() is None

    @property
    def is_complete(self) -> bool:
        """Whether there is a report."""
        return self._report is not None

    @property
    def num_steps(self) -> int:
        """How many steps it has come to; one that raised counts, but is not in the report."""
        return self._records.num_steps

    def report(self) -> StepReport:
        """What was measured, the same on every rank. It sends nothing, so one rank alone may call it.

        Raises:
            ReplicationError: The measurement has not ended, or has recorded no step.
        """
        if self._report is None:
            found = f"{self.num_steps} steps" if self._steps is None else f"{self.num_steps} of {self._steps} steps"
            way_out = (
                "It has ended; call model.measure() again, and train while it records"
                if self.is_over
                else "Train on, or call stop() on every rank between the same two steps to have the report of these"
            )
            raise ReplicationError(f"{this_rank()}: there is no report: {found} have been measured. {way_out}")
        return self._report

    def stop(self) -> None:
        """End now, with a report of the steps so far. Call it on every rank; does nothing after the end.

        Raises:
            RanksDifferError: Another rank has not called it within the process group's timeout.
            ReductionError: The exchange failed.
        """
        replica = self._replica()
        if replica is not None and not self._is_over:
            _refuse_between(replica, "stop()")
            replica.monitor.agree_on_measurement("stop() of a measurement")
            self.exchange()

    def abandon(self) -> None:
        """End now, without a report."""
        replica = self._replica()
        if replica is not None and not self._is_over:
            replica.reducer.record_into(NO_RECORDS)
        self._is_over, self._hosts = True, None

    def last_step(self) -> Step | None:
        """The last complete step, of this rank alone; None before there is one."""
        steps = self._records.steps
        return _step({self._ranks[self._rank_in_group]: steps[-1]}) if steps else None

    def exchange(self) -> None:
        """Exchange the records with all ranks, which are here too, and make the report.

        Raises:
            RanksDifferError: Another rank is in the exchange of another model.
        """
        raw, plan, hosts = self._records.read_all(), self._records.plan, self._hosts
        replica = self._replica()
        assert replica is not None
        self.abandon()
        models = [name.decode() for name in _among_ranks(exchange_bytes, replica.monitor.model.encode(), *hosts)]
        if len(set(models)) > 1:
            raise error_messages.measured_models_differ(dict(zip(self._ranks, models, strict=True)))
        later = _among_ranks(measure_offsets, *hosts)
        offsets = [before.and_later(after) for before, after in zip(self._offsets, later, strict=True)]
        message = zlib.compress(json.dumps([_to_list(step) for step in raw]).encode())
        messages = _among_ranks(exchange_bytes, message, *hosts)
        everyone = [_from_message(each, offset) for each, offset in zip(messages, offsets, strict=True)]
        numbers = set.intersection(*(set(steps) for steps in everyone))  # a rank may have dropped a step
        if numbers:
            assert plan is not None
            self._report = self._report_of(everyone, numbers, plan, offsets, replica)
        self._then()

    def _report_of(
        self,
        everyone: Sequence[Mapping[int, RawStep]],
        numbers: Iterable[int],
        plan: BucketPlan,
        offsets: Iterable[Offset],
        replica: Replica,
    ) -> StepReport:
        return StepReport(
            model=self._model,
            algorithm=replica.reducer.algorithm.name,
            plan=plan,
            steps=tuple(
                _step({rank: steps[number] for rank, steps in zip(self._ranks, everyone, strict=True)})
                for number in sorted(numbers)
            ),
            clock_error_s=sum(sorted(offset.error_ns for offset in offsets)[-2:]) / 1e9,
            device=self._device.type,
            explanation=self._explain(),
        )

    @property
    def periods_s(self) -> list[float]:
        """The times from the first forward of a step to that of the next one, on this rank, in seconds."""
        pairs = itertools.pairwise(self._records.steps)
        return [(after.began - before.began) / 1e9 for before, after in pairs if after.number == before.number + 1]

    def __enter__(self) -> Measurement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.abandon()


def _refuse(replica: Replica, steps: int | None) -> None:
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise ValueError(
            f"{this_rank()}: measure(steps={steps!r}) must be an integer of at least 1, or None to record until stop()"
        )
    if not dist.is_initialized():
        raise ReplicationError(
            f"{this_rank()}: measure() was called after destroy_process_group(), but it aligns the clocks of the ranks;"
            " call it before, and train while it records"
        )
    _refuse_between(replica, "measure()")
    if not replica.reducer.algorithm.traits.in_step:
        raise ReplicationError(
            f"{this_rank()}: measure() compares a step of all ranks, but with the {replica.reducer.algorithm.name} no"
            " rank waits for another; measure with another algorithm"
        )
    if replica.measurement is not None and not replica.measurement.is_over:
        raise ReplicationError(
            f"{this_rank()}: measure() was called while another measurement of this model records; call stop() on it"
            " first, on every rank"
        )


def _refuse_between(replica: Replica, call: str) -> None:
    if not replica.reducer.is_between_steps:
        raise ReplicationError(
            f"{this_rank()}: {call} was called while a backward has not been completed; call it between two steps, on"
            " every rank"
        )


def _exchange_of(measurement: Measurement) -> Callable[[], None]:
    """Its exchange, without keeping it, and so a process group, alive: the records that it owns have this."""
    number, reference = measurement._number, weakref.WeakMethod(measurement.exchange)

    def exchange() -> None:
        if (alive := reference()) is not None:
            when_pass_ends(number, alive)

    return exchange


def _among_ranks(exchange: Callable[..., Result], *args: Any) -> Result:
    try:
        return exchange(*args)
    except RuntimeError as error:
        raise error_messages.exchange_failed("exchange of records of model.measure()", error) from error


# From raw records to those of the report.


def _to_list(step: RawStep) -> list[Any]:
    transfers = [
        [t.bucket, t.kind, t.num_bytes, t.ready, t.launched, t.launch_returned, t.done, t.waited_from, t.waited_until]
        for t in step.transfers
    ]
    return [step.number, step.began, step.backward_began, step.ended, step.blocked, transfers]


def _from_message(message: bytes, offset: Offset) -> dict[int, RawStep]:
    """The steps of a rank by their numbers, on rank 0's clock."""

    def here(at: int | None) -> int | None:
        return None if at is None else at + offset.ns

    steps = {}
    for number, began, backward_began, ended, blocked, transfers in json.loads(zlib.decompress(message)):
        steps[number] = RawStep(
            number=number,
            began=here(began),
            backward_began=here(backward_began),
            ended=here(ended),
            blocked=[(here(since), here(until)) for since, until in blocked],
            transfers=[
                RawTransfer(
                    bucket=bucket,
                    kind=kind,
                    num_bytes=num_bytes,
                    ready=here(ready),
                    launched=here(launched),
                    launch_returned=here(returned),
                    done=[at + offset.ns for at in done],
                    waited_from=here(waited_from),
                    waited_until=here(waited_until),
                )
                for bucket, kind, num_bytes, ready, launched, returned, done, waited_from, waited_until in transfers
            ],
        )
    return steps


def _step(raw: Mapping[int, RawStep]) -> Step:
    """One step of these ranks; their records are on one clock."""
    origin_ns = min(step.began for step in raw.values())

    def seconds(at: int | None) -> Any:
        return None if at is None else (at - origin_ns) / 1e9

    def transfers(step: RawStep) -> Iterable[Transfer]:
        for each in step.transfers:
            yield Transfer(
                bucket=each.bucket,
                kind=each.kind,
                num_bytes=each.num_bytes,
                ready=seconds(each.ready),
                launched=seconds(each.launched),
                launch_returned=seconds(each.launch_returned),
                done=seconds(each.done[0]) if each.done else None,
                waited_from=seconds(each.waited_from),
                waited_until=seconds(each.waited_until),
            )

    ranks = tuple(
        RankStep(
            rank=rank,
            began=seconds(step.began),
            backward_began=seconds(step.backward_began),
            ended=seconds(step.ended),
            transfers=tuple(transfers(step)),
            drained_s=_drained_ns(step) / 1e9,
        )
        for rank, step in raw.items()
    )
    return Step(number=next(iter(raw.values())).number, ranks=ranks)


def _drained_ns(step: RawStep) -> float:
    """How long the rank was blocked, but not for one of the transfers."""
    waits = [(t.waited_from, t.waited_until) for t in step.transfers if t.waited_until is not None]
    return union_length([*step.blocked, *waits]) - union_length(waits)
