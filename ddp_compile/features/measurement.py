"""``model.measure()``: records some steps on every rank, and makes one report of them.

Note [When records are exchanged]
A report needs the records of all ranks. They are exchanged in the backward that ends the last step, where every rank is
and nothing of the model is under way, so that later one rank alone can look at the report. A measurement without an end
is exchanged in `Measurement.stop`. While it records, nothing more is sent than without it. If one backward reaches
several models that are measured, their steps must end in the same order on every rank; if not, every rank raises.
"""

from __future__ import annotations

import pickle
import weakref
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.report.step_report import StepReport
from ddp_compile.report.steps import RankStep, Step, Transfer, union_length
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.exchange import Exchange
from ddp_compile.runtime.comm.host_clock import exchange_bytes, measure_offsets
from ddp_compile.runtime.comm.process_groups import host_group
from ddp_compile.runtime.comm.step_records import NO_RECORDS, RawStep, StepRecords
from ddp_compile.runtime.comm.streams import work_blocks_host

if TYPE_CHECKING:
    from ddp_compile.module.replicate_state import ReplicateState

#: How many steps a measurement without an end keeps.
MOST_KEPT = 100
_RECORDS = "exchange of records of model.measure()"


class Measurement:
    """A measurement under way, or its report; ``model.measure()`` returns it.

    As a context manager it stops at the end, without a report if an exception leaves it.

    Args:
        replica: The state of the model; not kept alive, since users may keep the report for longer than the model.
        steps: How many steps to record; None for any number.

    Raises:
        ValueError: ``steps`` is not a positive integer.
        ReplicationError: It cannot begin now.
        RanksDifferError: Another rank measures other steps, or none within the process group's timeout.
    """

    def __init__(self, replica: ReplicateState, steps: int | None) -> None:
        _refuse(replica, steps)
        reducer, group, device = replica.reducer, replica.process_group, replica.device
        first = reducer.iteration_number + reducer.is_within_iteration
        replica.monitor.agree_on_measurement(f"measure(steps={steps})", f" from iteration {first} on")
        self._replica = weakref.ref(replica)
        self._steps, self._device = steps, device
        self._ranks, self._rank_in_group = dist.get_process_group_ranks(group), group.rank()
        self._report: StepReport | None = None
        self._is_over = False
        self._hosts: Any = host_group(group, device, own=False)
        with Exchange(_RECORDS):
            self._offsets = measure_offsets(*self._hosts)
        self._records = StepRecords(
            device,
            reducer.iteration_number,
            first,
            steps,
            steps or MOST_KEPT,
            work_blocks_host(group, device),
            torch_internals.while_alive(self.exchange),  # records must not keep it, and so a process group, alive
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
        return _step({self._ranks[self._rank_in_group]: (0, steps[-1])}) if steps else None

    def exchange(self) -> None:
        """Exchange the records with all ranks, which are here too, and make the report.

        Raises:
            RanksDifferError: Another rank is in the exchange of another model.
        """
        raw, plan, hosts = self._records.read_all(), self._records.plan, self._hosts
        replica = self._replica()
        assert replica is not None
        self.abandon()
        message = zlib.compress(pickle.dumps((replica.monitor.model, raw)))
        with Exchange(_RECORDS):
            received = [pickle.loads(zlib.decompress(each)) for each in exchange_bytes(message, *hosts)]
            models = [model for model, _ in received]
            if len(set(models)) > 1:
                raise error_messages.measured_models_differ(dict(zip(self._ranks, models, strict=True)))
            later = measure_offsets(*hosts)
        offsets = [before.and_later(after) for before, after in zip(self._offsets, later, strict=True)]
        everyone = [{step.number: step for step in steps} for _, steps in received]
        numbers = set.intersection(*(set(steps) for steps in everyone))  # a rank may have dropped a step
        if not numbers:
            return
        assert plan is not None
        by_rank = list(zip(self._ranks, offsets, everyone, strict=True))
        self._report = StepReport(
            model=replica.model,
            algorithm=replica.reducer.algorithm.name,
            plan=plan,
            steps=tuple(
                _step({rank: (offset.ns - steps[number].ahead_ns, steps[number]) for rank, offset, steps in by_rank})
                for number in sorted(numbers)
            ),
            clock_error_s=sum(sorted(offset.error_ns for offset in offsets)[-2:]) / 1e9,
            device=self._device.type,
            explanation=replica.explain(),
        )

    def __enter__(self) -> Measurement:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop()
        else:
            self.abandon()


def _refuse(replica: ReplicateState, steps: int | None) -> None:
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


def _refuse_between(replica: ReplicateState, call: str) -> None:
    if not replica.reducer.is_between_steps:
        raise ReplicationError(
            f"{this_rank()}: {call} was called while a backward has not been completed; call it between two steps, on"
            " every rank"
        )


# From raw records to those of the report.


def _step(raw: Mapping[int, tuple[int, RawStep]]) -> Step:
    """From what each rank has recorded, and what to add to its clock to get rank 0's, in ns."""
    origin_ns = min(step.began + offset_ns for offset_ns, step in raw.values())
    ranks = [_rank_step(rank, step, origin_ns - offset_ns) for rank, (offset_ns, step) in raw.items()]
    return Step(number=min(step.number for _, step in raw.values()), ranks=tuple(ranks))


def _rank_step(rank: int, step: RawStep, origin_ns: int) -> RankStep:
    """One rank's part of a step; the origin is on its own clock."""

    def seconds(at: int | None) -> Any:
        return None if at is None else (at - origin_ns) / 1e9

    transfers = [
        Transfer(
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
        for each in step.transfers
    ]
    return RankStep(
        rank=rank,
        began=seconds(step.began),
        backward_began=seconds(step.backward_began),
        ended=seconds(step.ended),
        transfers=tuple(transfers),
        drained_s=_drained_ns(step) / 1e9,
        counts_s=union_length(step.counts) / 1e9,
        clip_s=union_length(step.clips) / 1e9,
    )


def _drained_ns(step: RawStep) -> float:
    """How long the rank was blocked, but not for one of the transfers."""
    waits = [(t.waited_from, t.waited_until) for t in step.transfers if t.waited_until is not None]
    return union_length([*step.blocked, *waits]) - union_length(waits)
