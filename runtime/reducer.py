"""The reducer: counts gradients as they arrive, launches complete buckets in plan order, and hands over the means.

docs/reducer.md shows how a gradient passes through it.

Note [Correctness belongs to the reducer]
The reducer counts arrivals and trusts no graph split. Whatever is compiled, broken, eager or skipped, a bucket is
launched when all its gradients are there, and all ranks launch their buckets in plan order. Splits only decide how
early that is.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.config import ReplicateConfig
from ddp_compile.errors import GradientArrivalError, NonFiniteGradientError, ReductionError, this_rank
from ddp_compile.plan.builder import PlanBuilder
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.arrivals.accumulators import Accumulators
from ddp_compile.runtime.arrivals.backwards_alone import BackwardsAlone
from ddp_compile.runtime.arrivals.parameter_hooks import ParameterHooks
from ddp_compile.runtime.arrivals.policies import policy_for
from ddp_compile.runtime.arrivals.undefined_gradients import UndefinedGradients
from ddp_compile.runtime.buckets.bucket import Bucket, drop_gradients
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm
from ddp_compile.runtime.buckets.computed_bucket import EarlyDecision
from ddp_compile.runtime.comm import error_messages, streams
from ddp_compile.runtime.comm.step_records import NoRecords
from ddp_compile.runtime.desync.local_steps import LocalSteps
from ddp_compile.runtime.desync.monitor import DesyncMonitor
from ddp_compile.runtime.early_launch import EarlyLaunch
from ddp_compile.runtime.host_memory import keep_freed_memory
from ddp_compile.runtime.iteration_end import IterationEnd
from ddp_compile.runtime.launch_queue import LaunchQueue
from ddp_compile.runtime.lifecycle import Event, Lifecycle, Phase, State, nothing_to_finalize

log = logging.getLogger(__name__)


class Reducer:
    """Averages the gradients of one module over the ranks of a process group.

    Args:
        parameters: The parameters to reduce, in registration order, as ``builder.gradients`` lists them.
        builder: The module's plan; sealed at the first synchronized backward, before anything is launched.
        has_launches: Returns whether a graph was compiled whose backward hands buckets over. None on every rank if none
            ever will be.
        on_reduced: Called when every ``.grad`` of an iteration is final, before the backward returns.
        on_plan_sealed: Called once, on every rank, with the plan that all ranks have agreed on.

    Source: the life of a backward (prepare, mark ready, launch in order, finalize in an engine callback) is that of
    ``Reducer`` in torch 2.13, csrc/distributed/c10d/reducer.cpp.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        builder: PlanBuilder,
        process_group: dist.ProcessGroup,
        *,
        config: ReplicateConfig,
        algorithm: CommAlgorithm,
        monitor: DesyncMonitor,
        has_launches: Callable[[], bool] | None,
        on_reduced: Callable[[], None],
        on_plan_sealed: Callable[[BucketPlan], None],
    ) -> None:
        self.parameters = tuple(parameters)
        self.finalizes_manually = False  #: whether `finalize_manually` must be called after each backward
        #: Called after each iteration that the ranks have reduced together, when nothing of it is under way.
        self.on_iteration_ended: Callable[[], None] = lambda: None
        self._monitor = monitor
        self._on_plan_sealed = on_plan_sealed
        self._lifecycle = Lifecycle()
        self._set = BucketSet(self.parameters, builder, process_group, config, monitor)
        accumulators = Accumulators(self.parameters)
        self._undefined = UndefinedGradients(self._set, accumulators)
        self._policy = policy_for(config, self._set)
        self._queue = LaunchQueue(self._set, process_group.size(), monitor, algorithm, self._policy, self._undefined)
        self._hooks = ParameterHooks(self.parameters, accumulators, self)
        self._early = EarlyLaunch(
            self._set, self._queue, self._hooks, accumulators, self._policy, has_launches is not None
        )
        self._has_launches = has_launches or (lambda: False)
        self._end = IterationEnd(self._set, self._queue, self._policy, self._early, monitor, on_reduced)
        self._queue.on_all_launched = self._end.all_are_launched
        self._alone = BackwardsAlone(len(self.parameters))
        self._local_steps = LocalSteps(self.parameters)
        self._is_removed = False
        if any(parameter.is_cpu for parameter in self.parameters):
            keep_freed_memory()

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets in plan order; none until the plan is sealed."""
        return self._set.buckets

    @property
    def early_buckets(self) -> Sequence[Bucket]:
        """Those that compiled backwards have launched on this rank as soon as they were computed, in plan order."""
        return [bucket for bucket in self.buckets if bucket.was_launched_early]

    @property
    def is_between_steps(self) -> bool:
        """Whether no iteration is under way, and none was ended by an exception."""
        return self._lifecycle.phase.state in (State.ARMED, State.LOCAL)

    # The algorithm.

    @property
    def algorithm(self) -> CommAlgorithm:
        return self._queue.algorithm

    def agree_on_algorithm(self, algorithm: CommAlgorithm, always: bool = False) -> None:
        """Before `set_algorithm`, check that all ranks are about to call it. This changes nothing.

        Args:
            always: Compare before the first backward too, which otherwise compares by itself.

        Raises:
            RuntimeError: A backward has not been completed.
            RanksDifferError: After the first backward, another rank does something else.
        """
        if not self.is_between_steps:
            raise error_messages.algorithm_in_backward(algorithm.name)
        if self.buckets or always:
            self._monitor.agree_on_algorithm(algorithm.name)

    def set_algorithm(self, algorithm: CommAlgorithm) -> None:
        """Use another algorithm from the next backward on. Nothing of the previous one may be under way."""
        self._queue.algorithm = algorithm
        algorithm.sharding.record_into(self._queue.records)
        self._set.lay_out_as(algorithm.traits.layout, algorithm.sharding.owners)

    # The plan.

    def replace_plan(self, proposed: BucketPlan) -> bool:
        """Reduce by what rank 0 proposes from now on; called on every rank at the end of an iteration.

        Returns:
            Whether it is the plan now. The same on every rank; not if what is sharded cannot follow.

        Raises:
            ReductionError: Another rank did not come.
        """
        plan, sharding = self._set.plan_of_rank_0(proposed), self.algorithm.sharding
        if plan == self._set.plan:
            return True
        if objection := sharding.plan_changes():
            log.warning(
                "%s: the bucket plan stays, since the sharded optimizer cannot follow: %s", this_rank(), objection
            )
            return False
        self._set.replace_plan(plan)
        sharding.follow_plan(self.buckets)
        return True

    # Records of steps.

    def record_into(self, records: NoRecords) -> None:
        """From now on, tell these records of what happens."""
        self._queue.records = records
        self.algorithm.sharding.record_into(records)

    @property
    def iteration_number(self) -> int:
        """Number of the iteration that is under way or comes next."""
        return self._set.iteration.number

    @property
    def is_within_iteration(self) -> bool:
        """Whether a forward of the iteration has come, or parameters may be arriving for it."""
        phase = self._lifecycle.phase
        return phase != Phase(State.ARMED, False) or (self.gathers_parameters and bool(self.buckets))

    @property
    def gathers_parameters(self) -> bool:
        """Whether parameters may still be written when a forward begins."""
        return self.algorithm.sharding.gathers_parameters

    def await_parameters(self, param_indices: Sequence[int]) -> None:
        """Return when these parameters, which compiled code is about to read, are complete."""
        self.algorithm.sharding.await_parameters(param_indices)

    # A forward.

    def refuse_capture(self, what: str) -> None:
        """Raise a ReplicationError while a graph is being captured: its replays would bypass the reducer."""
        streams.refuse_capture(self.parameters[0].device, what)

    def prepare_for_backward(self, synchronize: bool) -> None:
        """Before a forward, set whether a backward that follows it is reduced.

        Args:
            synchronize: False inside ``no_sync``: gradients accumulate locally.

        Raises:
            MissingGradientError: The previous backward left parameters without a gradient.
            ReductionError: The previous backward raised after its reduction had started.
        """
        self._refuse_unfinalized()
        self._local_steps.forward_begins()
        self._monitor.local_steps_are(self._local_steps.num_found)
        if self._lifecycle.phase.state is State.INCOMPLETE:
            self._refuse_missing_gradients()
        if self.is_between_steps:
            self._watch_hooked_parameters()
            if synchronize:
                self._alone.forget()
        if self._lifecycle.on(Event.FORWARD if synchronize else Event.LOCAL_FORWARD) is State.FAILED:
            # Not waited for: ranks that stopped elsewhere may never join what this rank launched.
            raise error_messages.out_of_step()
        records = self._queue.records
        records.forward_begins()
        since = records.block_begins()
        try:
            if self.algorithm.step_watch is not None:
                self.algorithm.step_watch.forward_begins(synchronize)
            self.algorithm.before_forward(synchronize)
        except ReductionError as error:
            raise self._monitor.report_failure(error) from error.__cause__
        records.block_ends(since)

    def forward_raised(self) -> None:
        """The forward that was announced by `prepare_for_backward` has raised, so it has no backward."""
        self._lifecycle.forward_raised()

    def search_unused_parameters(self, outputs: Any) -> None:
        """After a synchronized forward, find the parameters that no backward from its outputs can reach."""
        self._policy.search(outputs, weakref.WeakMethod(self._outputs_are_reached))

    def await_at_the_end(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Make the end of the next iteration wait for futures, for example of a buffer comm hook."""
        self._end.await_also(futures)

    def _refuse_unfinalized(self) -> None:
        if self._lifecycle.phase.state is State.LAUNCHED:
            raise error_messages.not_finalized("a forward")

    def _refuse_missing_gradients(self) -> None:
        missing = {self._set.names[index]: self.parameters[index] for index in self._queue.missing}
        try:
            self._queue.wait()
        finally:
            self._begin_iteration()
        raise error_messages.missing_gradients(missing, len(self.parameters), self._set.config.static_graph)

    def _watch_hooked_parameters(self) -> None:
        """Watch for undefined gradients of parameters with users' hooks, which may remove gradients."""
        for index in self._hooks.with_hooks_of_others():
            self._undefined.watch(index)

    # Inside ``Join``; see `ddp_compile.features.uneven_inputs`.

    def refuse_second_forward(self) -> None:
        """Raise a ReplicationError if the backward of a synchronized forward has not come."""
        self._refuse_unfinalized()
        if self._lifecycle.phase == Phase(State.ARMED, True):
            raise error_messages.second_forward_in_join()

    def enter_join(self, divisor: int) -> None:
        """From now on divide by this, and compare no fingerprints, since the ranks do different things on purpose."""
        self._queue.divisor = divisor
        self._monitor.is_paused = True

    def leave_join(self) -> None:
        """Undo this: all ranks train again."""
        self._queue.divisor = self._queue.world_size
        self._monitor.is_paused = False

    def shadow_backward(self) -> None:
        """Join the other ranks' backward with zeros, after `prepare_for_backward`.

        Raises:
            ReductionError: A reduction failed or timed out.
            ReplicationError: With a static graph, this rank has not learned which gradients come.
        """
        self._policy.refuse_shadow()
        self._start_iteration()
        self._queue.launch_shadows()
        self._finish_iteration()

    # A gradient arrives.

    def mark_parameter_ready(self, index: int) -> None:
        """A parameter's gradient has been accumulated into ``.grad``.

        Raises:
            GradientArrivalError: It arrived before in the same iteration, was taken for unused, or was removed.
        """
        self.hooks_have_run()
        self._hooks.flush(index)
        phase = self._lifecycle.phase
        if self._early.arrived(index) and phase.state is not State.LAUNCHED:
            return
        if phase.state is State.LOCAL or (self._lifecycle.had_local_forward and self._is_of_local_forward):
            self.algorithm.sharding.backward_begins()
            self._note(index)
            self._local_steps.gradient_arrives(index)
        elif not self.buckets and not phase.after_forward:
            self._note(index)
            self._alone.arrive(index)
            self._call_back_when_pass_ends(self._end_backward_alone)
        else:
            self._enter_backward((index,))
            self._arrive(index)

    @property
    def _is_of_local_forward(self) -> bool:
        """Whether a gradient that comes now is of a forward inside ``no_sync``, although another backward is expected.

        Nothing has reached the forward of that one: it comes later, or it has raised in the loss.
        """
        lifecycle = self._lifecycle
        return lifecycle.had_local_forward and lifecycle.phase.state is State.ARMED and self._monitor.awaits_backward

    def _note(self, index: int) -> bool:
        """Record what a parameter holds on arrival; returns whether its gradient is undefined."""
        is_undefined = self._undefined.arrive(index)
        if not is_undefined:
            self._policy.note(index)
        return is_undefined

    def _arrive(self, index: int) -> None:
        """Count a gradient. The last one of a bucket completes the bucket after all other hooks have run."""
        is_undefined = self._note(index)
        self._set.note_arrival(index)
        bucket = self._set.of_parameter[index]
        bucket.note_stream()
        if not self._policy.counts(bucket, index, is_undefined):
            return
        if index not in bucket.iteration.pending:
            raise error_messages.arrived_twice(self._set.names[index])
        if bucket.arrive(index):
            self._hooks.note_last(index)
            self._hooks.notify_after_others(index)
            self._set.iteration.with_running_hooks.append(bucket)

    def hooks_have_run(self) -> None:
        """All hooks on the parameter that arrived last have run, so the buckets that it completes are ready."""
        buckets = self._set.iteration.with_running_hooks
        while buckets:
            self._queue.complete(buckets.pop(0))

    def _enter_backward(self, arriving: tuple[int, ...]) -> None:
        """A backward has brought the gradients of these parameters. The first time, prepare for the rest."""
        before = self._lifecycle.phase.state
        if before is not State.REDUCING:
            self._start_iteration(arriving)
            self._watch_hooked_parameters()  # again, since there may be new hooks
            self._queue.leave_out_unused()
        is_first_of_pass = self._call_back_when_pass_ends(self.finalize_backward)
        if is_first_of_pass and not self._set.notes_arrivals and not self._policy.counts_each:
            for bucket in self._queue.not_launched:
                self._hooks.batch(bucket, arriving)
        if before is not State.REDUCING:
            self._queue.do_without(self._policy.absent_from_the_start(arriving))

    def _start_iteration(self, arriving: tuple[int, ...] = ()) -> None:
        """Enter an iteration, or enter it again, with a first gradient or with zeros in its place."""
        self.refuse_capture("a backward of a replicated module")
        self.algorithm.sharding.backward_begins()
        before = self._lifecycle.phase.state
        # First, so that any later exception, even Ctrl-C during the agreement, is noticed.
        if self._lifecycle.on(Event.GRADIENT) is State.FAILED:
            if before is State.LAUNCHED:
                raise error_messages.not_finalized(f"a gradient of {self._set.names[arriving[0]]}")
            raise error_messages.out_of_step()
        if before is State.ARMED:
            self._monitor.backward_begins(self._lifecycle.phase.after_forward)
            self._queue.records.backward_begins()
        if not self.buckets:
            self._on_plan_sealed(self._set.seal(self.algorithm.name, self._early.is_enabled, self._has_launches()))

    def _call_back_when_pass_ends(self, callback: Callable[[], None]) -> bool:
        """Once for each pass, queue a callback for its end; returns whether this is the first call in this pass.

        A backward is one pass, and one more for each reentrant checkpoint.
        """
        task, passes = torch_internals.current_graph_task_id(), self._set.iteration.passes
        if task in passes:
            return False
        passes.add(task)
        torch_internals.queue_backward_callback(callback)
        return True

    def _outputs_are_reached(self) -> None:
        """End the first iteration of a static graph with this pass, even if all gradients come in passes inside it."""
        self._call_back_when_pass_ends(self.finalize_backward)

    # A compiled backward has computed a whole bucket; called by the operators of `ddp_compile.graph_ops`.

    def mark_bucket_ready(self, param_indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Launch a bucket if that is safe. Otherwise its parameters' hooks will.

        AccumulateGrad has not seen the gradients yet, and others may follow: Note [Launched before AccumulateGrad].

        Args:
            param_indices: The bucket's parameters in its order.
            gradients: Their gradients, which the backward will return. They are only read.
        """
        bucket, decision = self._decide(tuple(param_indices), moves=False)
        if bucket is not None:
            self._early.launch(bucket, decision, gradients, moves=False)

    def move_bucket(self, param_indices: Sequence[int], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """`mark_bucket_ready` for a backward that can return other tensors than it has computed.

        Args:
            param_indices: The bucket's parameters in its order.
            gradients: Their gradients, not used after this.

        Returns:
            What the backward returns: views into the flat buffer, or copies if the bucket is not launched now or has
            not been launched early before.
        """
        bucket, decision = self._decide(tuple(param_indices), moves=True)
        # Compiled code expects aligned results, but with a comm hook the places have no padding.
        can_move = bucket is not None and bucket.was_launched_early and bucket.is_aligned
        if bucket is not None and can_move and decision is EarlyDecision.LAUNCH:
            bucket.claim(bucket.gradients())  # while ``.grad`` says which views are gradients
            views = bucket.new_views()
            self._early.launch(bucket, decision, views, moves=True, moved=gradients)
            return views
        pairs = zip(param_indices, gradients, strict=True)
        copies = [torch.empty_like(self.parameters[index]).copy_(gradient) for index, gradient in pairs]
        if bucket is not None:
            self._early.launch(bucket, decision, copies, moves=True)
        return copies

    def ignore_computed_buckets(self, buckets: Sequence[tuple[int, ...]]) -> None:
        """Leave these buckets, given by their parameters, to their hooks: graphs also run for other parameters."""
        self._early.ignore(buckets)

    def _decide(self, param_indices: tuple[int, ...], moves: bool) -> tuple[Bucket | None, EarlyDecision]:
        """What happens to a computed bucket. None if it waits; otherwise the backward has begun."""
        wait, phase = (None, EarlyDecision.WAIT), self._lifecycle.phase
        is_alone = not self.buckets and not phase.after_forward  # see `BackwardsAlone`
        if self._is_removed or not self._queue.sends or is_alone or phase.state in (State.LOCAL, State.FAILED):
            return wait
        if self._is_of_local_forward:
            return wait
        self.hooks_have_run()
        self._hooks.flush(param_indices[0])
        self.hooks_have_run()
        decision = self._early.decide(param_indices, moves)
        if decision is EarlyDecision.WAIT:
            return wait
        self._enter_backward(param_indices)
        bucket = self._set.of_param_indices.get(param_indices)
        # The bucket may be another rank's plan's, or launched without parameters that no output led to.
        if bucket is None or not bucket.is_pending or not bucket.may_launch_early:
            return wait
        return bucket, decision

    # The backward ends.

    def finalize_backward(self) -> None:
        """Wait for every bucket and hand over its gradients. Runs when a backward pass has ended.

        With a reentrant checkpoint, passes end inside the backward, which is over only when every bucket has been
        launched.

        Raises:
            ReductionError: A reduction failed or timed out.
            GradientArrivalError: A bucket was launched too early and cannot be launched again.
            NonFiniteGradientError: With ``check_finite_gradients``, a gradient of some rank was infinite or NaN.
        """
        if self._lifecycle.phase.state is not State.REDUCING:
            return  # a pass inside this one has seen the last gradient
        self.hooks_have_run()
        self._hooks.flush_all()
        self.hooks_have_run()
        if not self._queue.all_launched:
            if torch_internals.is_inside_backward() and not self._policy.is_last_pass():
                return  # later passes queue their own callbacks
            if not self._queue.complete_without_the_missing(self._lifecycle.phase.after_forward):
                # Another backward may bring the rest, but users must not see a gradient that is still being reduced.
                self._queue.wait()
                self._monitor.backward_is_incomplete()
                self._early.hand_over_incomplete()
                self._lifecycle.on(Event.LEFT_OUT)
                return
        if self.finalizes_manually:
            self._end.tell_the_others()
            self._lifecycle.on(Event.ALL_LAUNCHED)
        else:
            self._finish_iteration()

    def _end_backward_alone(self) -> None:
        """End a backward that came before any call of the module; see `BackwardsAlone`."""
        if torch_internals.is_inside_backward():
            return
        if self._lifecycle.phase.state is State.LOCAL:  # a hook called the module inside no_sync
            self._alone.forget()
        elif arrived := self._alone.backward_ends():
            self._start_iteration()
            for index in arrived:
                self._set.note_arrival(index)
            for index, bucket in enumerate(self._set.of_parameter):
                self._policy.counts(bucket, index, is_undefined=self.parameters[index].grad is None)
            for bucket in self.buckets:
                self._queue.complete(bucket)
            self.finalize_backward()

    def require_manual_finalization(self, required: bool) -> None:
        """Set `finalizes_manually`; raises RuntimeError while a backward has not been completed."""
        if not self.is_between_steps:
            raise error_messages.manual_finalization_in_backward(required)
        self.finalizes_manually = required

    def finalize_manually(self) -> None:
        """Wait for the reductions of the backward that has ended, and hand over the gradients.

        Raises:
            RuntimeError: No reduction waits for this call.
            ReductionError, GradientArrivalError: As `finalize_backward`.
        """
        state = self._lifecycle.phase.state
        if state is not State.LAUNCHED:
            raise nothing_to_finalize(self.finalizes_manually, state)
        self._lifecycle.on(Event.FINALIZE)  # first, so that any later exception is noticed
        self._finish_iteration()

    def _finish_iteration(self) -> None:
        """Wait for the buckets, which are all launched, and hand over their gradients."""
        try:
            self._end.finish()
        except (GradientArrivalError, NonFiniteGradientError):
            self._begin_iteration()  # so that training can continue
            raise
        is_of_all = self._set.iteration.met_others or self._queue.world_size == 1
        if is_of_all:
            assert self._set.plan is not None
            self._queue.records.iteration_ends(self._set.plan)
        self._begin_iteration()
        traits = self.algorithm.traits
        if is_of_all:
            # Not before the next forward, in which a rank may be alone.
            if not traits.keeps_buckets:
                self._set.rebuild_once()
            self.on_iteration_ended()
        elif not traits.in_step:
            self._set.rebuild_never()
        self._queue.records.exchange_if_due()

    def _begin_iteration(self) -> None:
        self._set.begin_iteration()
        self._queue.records.iteration_begins(self._set.iteration.number)
        self._monitor.iteration_ends(self._set.iteration.number)
        self._hooks.notify_of_each()
        self._lifecycle.on(Event.ITERATION_ENDS)  # last, so that a cut-short end is not taken for complete

    def remove_hooks(self) -> None:
        """Remove all hooks, and drop the gradients of an iteration that an exception cut short.

        Some of them are means and some are this rank's own, and a reduction under way may still write to them.
        """
        self._hooks.remove()
        self._is_removed = True  # a later backward may still contain the operators
        if self._lifecycle.phase.state in (State.REDUCING, State.LAUNCHED, State.FAILED):
            drop_gradients(self.parameters)
