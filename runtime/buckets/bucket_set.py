"""The buckets of one module: all ranks agree on them at the first backward, and repack the eager tail once."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import torch.distributed as dist
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.config import ReplicateConfig
from ddp_compile.errors import RanksDifferError, ReductionError, number_of, this_rank
from ddp_compile.plan.builder import PlanBuilder
from ddp_compile.plan.spec import BucketPlan, Layout
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.gradients import store_for
from ddp_compile.runtime.buckets.iteration import Iteration
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.collectives import any_rank, plan_of_rank_0, verify_algorithms_agree
from ddp_compile.runtime.comm.exchange import Exchange
from ddp_compile.runtime.desync.monitor import DesyncMonitor

log = logging.getLogger(__name__)


class BucketSet:
    """The buckets of a module, and the iteration that they are in."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        builder: PlanBuilder,
        process_group: dist.ProcessGroup,
        config: ReplicateConfig,
        monitor: DesyncMonitor,
    ) -> None:
        self.iteration = Iteration(1)  #: the one under way, or the next one
        self.buckets: tuple[Bucket, ...] = ()  #: in plan order; none until the plan is sealed
        self.of_parameter: list[Bucket] = []  #: by parameter number
        self.of_param_indices: dict[tuple[int, ...], Bucket] = {}
        self.parameters = tuple(parameters)  #: in registration order, which is that of their numbers
        self.names = [gradient.fqn for gradient in builder.gradients]  #: fully qualified, of the parameters
        self._builder = builder
        self.process_group = process_group
        self.config = config
        self._monitor = monitor
        # With `find_unused_parameters` the next iteration may be different.
        self._first_is_typical = config.static_graph or not config.find_unused_parameters
        # Parameters in the order of their last gradients in the first iteration; None after `rebuild_once`.
        self._arrival_order: dict[int, None] | None = {}

    @property
    def plan(self) -> BucketPlan | None:
        """The plan that all ranks reduce by."""
        return self._builder.sealed

    def begin_iteration(self) -> None:
        """Replace the iteration that has ended, the module's and that of each bucket."""
        self.iteration = Iteration(self.iteration.number + self.iteration.met_others)
        for bucket in self.buckets:
            bucket.begin_iteration()

    def seal(self, algorithm: str, flags: Sequence[bool]) -> tuple[BucketPlan, list[bool]]:
        """Agree on the plan with the other ranks before anything is launched.

        ``flags`` are what else this rank says, as many on every rank. The first one is whether it has compiled a
        backward that hands buckets over; then all ranks let all buckets launch early. Returns the plan, and for each
        flag whether any rank has set it.

        Raises a RanksDifferError if the algorithms differ, and a ReductionError if another rank did not come.
        """
        device = self.parameters[0].device
        proposed = self._builder.propose()
        gradients = proposed.buckets[0].gradients
        first = f"bucket 0 ({gradients[0].fqn}, ..., {gradients[-1].fqn})"
        with Exchange(partial(_no_plan, f"before {first} could be launched"), self._monitor):
            verify_algorithms_agree(algorithm, self.process_group, device, self._monitor.model)
            plan = plan_of_rank_0(proposed, self.process_group, device)
            if plan.digest != proposed.digest:
                log.warning(
                    f"{this_rank()} cut its graphs for bucket plan {proposed.digest}"
                    f" ({number_of(len(proposed.buckets), 'bucket')}) but reduces by rank 0's plan {plan.digest}"
                    f" ({number_of(len(plan.buckets), 'bucket')}): the gradients are the same, but some buckets are"
                    " launched later than they could be"
                )
            of_any = any_rank(flags, self.process_group, device)
        self._install(plan)
        for bucket in self.buckets:
            bucket.let_launch_early(of_any[0])
        log.info("%s: plan %s sealed, %s", this_rank(), plan.digest, number_of(len(plan.buckets), "bucket"))
        return plan, of_any

    @property
    def notes_arrivals(self) -> bool:
        """Whether `note_arrival` must be called with every gradient."""
        return self._arrival_order is not None

    def note_arrival(self, index: int) -> None:
        """A parameter has got a gradient, or another contribution to it."""
        if self._arrival_order is not None:
            self._arrival_order.pop(index, None)
            self._arrival_order[index] = None

    def rebuild_once(self) -> None:
        """After the first iteration, repack the eager tail in the order in which its gradients came on rank 0.

        Gradients stay. Every rank calls it at the end of an iteration; raises a ReductionError if one does not come.

        Source: ``rebuild_buckets`` of torch 2.13, csrc/distributed/c10d/reducer.cpp, for the tail of a compiled plan.
        There it comes before the second forward.
        """
        order, self._arrival_order = self._arrival_order, None
        if order is None or not self._first_is_typical or self._builder.given is not None:
            return
        before, old_buckets = self.plan, self.buckets
        assert before is not None
        if not any(bucket.frame is None for bucket in before.buckets):
            return
        # Inside ``Join``, a rank that had no input in the first iteration knows no order.
        proposed = self._builder.reorder_tail(tuple(order)) if order else before
        with Exchange(partial(_no_plan, "after all buckets had been reduced"), self._monitor):
            plan = plan_of_rank_0(proposed, self.process_group, self.parameters[0].device)
        if plan == before:
            return
        self._install(plan)
        for bucket in old_buckets:
            if bucket not in self.buckets:
                bucket.buffer.drop()
        for bucket in self.buckets:
            if bucket not in old_buckets:
                bucket.gradient_store.adopt(bucket)
        number = number_of(len(plan.buckets), "bucket")
        log.info("%s: plan %s follows %s, %s", this_rank(), plan.digest, before.digest, number)

    def rebuild_never(self) -> None:
        """Keep the plan of the first iteration, since the ranks never come to the end of one together."""
        self._arrival_order = None

    def lay_out_as(self, layout: Layout, owners: Mapping[int, int]) -> None:
        """Between two iterations, give all buckets another layout, and those of later plans too.

        ``owners`` has the rank that steps all of a parameter, by the parameter's number, see `GradientSpec`.
        """
        self._builder.lay_out_as(layout, owners)
        if self.plan is not None:
            for bucket, spec in zip(self.buckets, self.plan.buckets, strict=True):
                bucket.lay_out_as(spec)
                bucket.take_name(self.plan.digest)

    def _refuse_other_model(self, plan: BucketPlan) -> None:
        theirs = {gradient.index: gradient for bucket in plan.buckets for gradient in bucket.gradients}
        ours = {gradient.index: gradient for gradient in self._builder.gradients}
        if theirs == ours:
            return
        index = min(i for i in theirs.keys() | ours.keys() if theirs.get(i) != ours.get(i))
        raise RanksDifferError(
            f"{this_rank()}: the bucket plan that rank 0 has sent is not that of {self._monitor.model}: it has"
            f" {theirs.get(index, 'nothing there')}, and the model has {ours.get(index, 'nothing there')}. Rank 0 has"
            " come to the end of another model's backward: call and finalize the backwards in one order on every rank,"
            " or give each model a process group of its own"
        )

    def _install(self, plan: BucketPlan) -> None:
        """Reduce by another plan from now on; buckets of both are kept. Raises if it is another model's plan."""
        self._refuse_other_model(plan)
        self._builder.seal(plan)
        torch_internals.trace_artifact(f"ddp_compile_plan_{plan.digest}", plan.to_json, "json")
        present = {(bucket.spec.gradients, bucket.spec.layout): bucket for bucket in self.buckets}
        buckets = []
        for spec in plan.buckets:
            bucket = present.get((spec.gradients, spec.layout))
            if bucket is None:
                parameters = [self.parameters[gradient.index] for gradient in spec.gradients]
                bucket = Bucket(
                    spec,
                    parameters,
                    store_for(spec, parameters, self.config.gradient_as_bucket_view),
                    self.config.lazy_bucket_allocation,
                )
                for former in {self.of_parameter[gradient.index] for gradient in spec.gradients if self.of_parameter}:
                    bucket.accumulates_like(former)
            bucket.spec = spec
            bucket.take_name(plan.digest)
            buckets.append(bucket)
        self.buckets = tuple(buckets)
        self.of_parameter = [buckets[plan.bucket_of_parameter[i]] for i in range(len(self.parameters))]
        self.of_param_indices = {bucket.param_indices: bucket for bucket in buckets}


def _no_plan(when: str, error: RuntimeError) -> ReductionError:
    return ReductionError(
        f"{this_rank()}: the ranks could not agree on the bucket plan, {when}."
        f" {error_messages.look_elsewhere('its backward', error)}"
    )
