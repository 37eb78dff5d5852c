"""``bucket_cap_mb="auto"``: a bucket plan from measured steps, replaced while the model trains.

Note [When a plan is measured and replaced]
Training begins with the default capacities. Soon every rank measures some steps, as by ``model.measure()``. At the end
of the backward of the last one, rank 0 plans by medians over ranks and steps, and sends every rank the plan to go on
with. So one slow step decides nothing, nor does one slow rank of three or more. Gradients, also those accumulated in
``no_sync``, and states of optimizers stay as they are; those of a sharded optimizer move to the ranks that step the new
pieces. The training graphs are compiled once more, since the plan decides where they are cut and what they launch. Some
steps of the new plan are measured too. If they are no shorter than those before, the old plan comes back.

Every `AGAIN_AFTER` iterations a few steps are measured again. The plan is replaced again only if the link has become
faster or slower by `LINK_FACTOR`. Between the measurements nothing is recorded and nothing is sent.

Whatever needs every rank happens at the end of a backward that all ranks have reduced, where nothing is under way. In a
forward a rank may be alone: it may evaluate with gradients, or accumulate in ``no_sync``. All ranks count iterations
alike, so all measure the same steps. A measurement by the user goes first.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from ddp_compile.errors import number_of, this_rank
from ddp_compile.features.measurement import Measurement, next_number, when_pass_ends
from ddp_compile.features.replica import Replica
from ddp_compile.plan.costs import Collective, Costs
from ddp_compile.plan.packing import replan
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.report.costs import collective_of, computation_of
from ddp_compile.report.step_report import StepReport
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.link_sweep import BUDGET_S, measure_link
from ddp_compile.runtime.desync.model_order import is_agreement_point

log = logging.getLogger(__name__)

#: The first iteration that is measured: by then the first plan is packed again, compiled, and launched early.
FIRST_MEASURED = 5
#: How many steps a measurement records.
NUM_MEASURED = 10
#: How many iterations pass from one measurement of a plan that stays to the next one.
AGAIN_AFTER = 1000
#: The part of a step that another plan has to save by prediction; less is not worth compiling again.
LEAST_GAIN = 0.02
#: The part of a step by which a new plan may be measured to be slower than the old one before that comes back. What a
#: launch costs is measured, but not what it costs to cut a graph in one more place.
MOST_LOSS = 0.0
#: All-reduces of several sizes, where they are needed, are not repeated sooner: they take at most 0.5 % of the time.
SWEEP_AGAIN_S = BUDGET_S / 0.005
#: A plan is not replaced again before the link's time for a bucket has changed by this factor.
LINK_FACTOR = 1.5


class AutomaticPlan:
    """Measures steps of one module and replaces its plan.

    Args:
        replica: Its state; owns this object.
        model: Name of the module's class.
        compile_again: Forgets the training graphs, so that the next forward compiles them by the present plan.
    """

    def __init__(self, replica: Replica, model: str, compile_again: Callable[[], None]) -> None:
        self._replica, self._model, self._compile_again = replica, model, compile_again
        self._algorithm = weakref.ref(replica.reducer.algorithm)  # the one that is measured
        self._number = next_number()
        self._next_at = FIRST_MEASURED
        self._measurement: Measurement | None = None
        self._planned_for: Collective | None = None  # the link that the last decision was made for
        self._is_on_trial = False  # whether the next measurement is the first one of a new plan
        self._trial: _Trial | None = None  # what rank 0 knows of it

    def iteration_ends(self) -> None:
        """Called on every rank at the end of an iteration, when nothing is under way."""
        reducer = self._replica.reducer
        if reducer.algorithm is not self._algorithm():
            self._begin_again()
        if self._measurement is None and reducer.iteration_number >= self._next_at:
            when_pass_ends(self._number, self._measure)

    def _measure(self) -> None:
        """Measure from the next iteration on."""
        if not self._user_measures:
            first = self._replica.reducer.iteration_number
            self._measurement = Measurement(self._replica, self._model, NUM_MEASURED, first, then=self._decide)

    def make_way(self) -> None:
        """The user begins to measure, or the model is unwrapped, on every rank: drop what is being measured."""
        if self._measurement is not None:
            self._measurement.abandon()
            self._measurement = None

    def _begin_again(self) -> None:
        """The optimizer is sharded from now on, or not any more, on every rank: what was measured is out of date."""
        self.make_way()
        self._algorithm = weakref.ref(self._replica.reducer.algorithm)
        self._planned_for, self._is_on_trial, self._trial = None, False, None
        self._next_at = self._replica.reducer.iteration_number + FIRST_MEASURED

    @property
    def _user_measures(self) -> bool:
        return self._replica.measurement is not None and not self._replica.measurement.is_over

    def _decide(self) -> None:
        """After a measurement, on every rank: go on with the plan that rank 0 chooses."""
        reducer, builder, rank = self._replica.reducer, self._replica.builder, self._replica.process_group.rank()
        measurement, self._measurement, present = self._measurement, None, builder.sealed
        assert measurement is not None and present is not None
        if not measurement.is_complete:
            self._next_at = reducer.iteration_number
            _log(rank, "plan %s stays for now: no step was recorded on all ranks", present.digest)
            return
        report = measurement.report()
        step_s = self._step_s(report, measurement.periods_s)
        chosen = present
        if self._is_on_trial:
            if rank == 0:
                chosen = self._judge(present, step_s)
        else:
            try:
                costs = self._costs(report)
            except ValueError as error:
                _log(rank, "plan %s stays, since these steps do not determine another one: %s", present.digest, error)
            else:
                if rank == 0:
                    chosen = self._choose(present, step_s, costs)
        if not reducer.replace_plan(chosen):
            self._planned_for = self._trial = None
        is_another = builder.sealed is not None and builder.sealed.digest != present.digest
        if is_another:
            self._compile_again()
        # A new plan is measured soon; one that has come back is not new.
        self._is_on_trial = is_another and not self._is_on_trial
        number = reducer.iteration_number
        self._next_at = _after_next_agreement_point(number) if self._is_on_trial else number + AGAIN_AFTER

    @property
    def _what(self) -> str:
        """What `_step_s` is."""
        return "a step" if self._replica.reducer.gathers_parameters else "a forward with its backward"

    def _step_s(self, report: StepReport, periods_s: Sequence[float]) -> float:
        """A forward and a backward; with a sharded optimizer from one forward to the next, as its step sends too."""
        if periods_s and self._replica.reducer.gathers_parameters:
            return median(periods_s)
        return median(step.duration_s for step in report.steps)

    def _judge(self, present: BucketPlan, step_s: float) -> BucketPlan:
        """After a new plan's first measurement: that plan, or the one before. Only rank 0 calls it."""
        assert self._trial is not None
        trial, self._trial = self._trial, None
        is_worse = step_s > trial.step_s * (1 + MOST_LOSS)
        log.info(
            "%s: plan %s: %s took %.2f ms; %.2f ms were expected, and with plan %s it took %.2f ms%s",
            *(this_rank(), present.digest, self._what, step_s * 1e3, trial.expected_s * 1e3, trial.plan.digest),
            *(trial.step_s * 1e3, ", so that one comes back" if is_worse else ""),
        )
        return replace(trial.plan, generation=present.generation + 1) if is_worse else present

    def _choose(self, present: BucketPlan, step_s: float, costs: Costs) -> BucketPlan:
        """The present plan, or a new one that is worth a trial. Only rank 0 calls it."""
        if self._planned_for is not None and not _has_changed(self._planned_for, costs.reduce, present):
            _log(0, "plan %s stays: the link has not become %g times faster or slower", present.digest, LINK_FACTOR)
            return present
        self._planned_for = costs.reduce
        following = replan(present, costs, LEAST_GAIN, self._replica.config.max_bucket_bytes)
        if following is None:
            _log(0, "plan %s stays: none is expected to be %g %% faster", present.digest, LEAST_GAIN * 100)
            return present
        # The prediction leaves out some of what is measured, so only its difference is taken.
        expected_s = step_s - following.present_s + following.expected_s
        self._trial = _Trial(present, step_s, expected_s)
        log.info(
            "%s: plan %s of %s replaces plan %s of %d: %s took %.2f ms, and %.2f ms are expected",
            *(this_rank(), following.plan.digest, number_of(len(following.plan.buckets), "bucket"), present.digest),
            *(len(present.buckets), self._what, step_s * 1e3, expected_s * 1e3),
        )
        return following.plan

    def _costs(self, report: StepReport) -> Costs:
        """By the transfers of the steps; if they determine no line, by transfers of their own. On every rank."""
        gradients, group = self._replica.builder.gradients, self._replica.process_group
        computation = computation_of(report, [g.fqn for g in gradients], [g.num_bytes for g in gradients])
        gathers = self._replica.reducer.gathers_parameters
        try:
            reduce = collective_of(report, group.size())
            gather = collective_of(report, group.size(), "gather") if gathers else None
        except ValueError:
            reduce, gather = self._measured_link(), None
            if gathers:  # a reduce-scatter and an all-gather are an all-reduce together
                reduce = gather = Collective(latency_s=reduce.latency_s / 2, s_per_byte=reduce.s_per_byte / 2)
        return computation.with_transfers(reduce, gather, group.size() if gathers else 1)

    def _measured_link(self) -> Collective:
        """By transfers of their own, which the gathers of the last step must not disturb."""
        replica = self._replica
        replica.reducer.algorithm.sharding.await_parameters()
        try:
            return measure_link(replica.process_group, replica.device, SWEEP_AGAIN_S)
        except RuntimeError as error:
            raise error_messages.exchange_failed("measurement of the link", error) from error


class _Trial(NamedTuple):
    """What was before a new plan."""

    plan: BucketPlan
    step_s: float  #: measured with that plan
    expected_s: float  #: with the new one


def _log(rank: int, text: str, *values: object) -> None:
    if rank == 0:
        log.info(f"%s: {text}", this_rank(), *values)


def _has_changed(before: Collective, now: Collective, plan: BucketPlan) -> bool:
    """Whether the link has become faster or slower for a bucket of median size."""
    num_bytes = median(bucket.num_bytes for bucket in plan.buckets)
    ratio = now.time_s(num_bytes) / before.time_s(num_bytes)
    return not 1 / LINK_FACTOR < ratio < LINK_FACTOR


def _after_next_agreement_point(iteration_number: int) -> int:
    """Buckets of a plan that comes with this iteration are launched early after the next agreement point."""
    return 1 + next(number for number in itertools.count(iteration_number) if is_agreement_point(number))
