"""A training step, verb by verb: a forward begins, gradients arrive, buckets are launched, the backward ends.

docs/reducer.md shows how a gradient passes through it.

Note [Correctness belongs to the reducer]
The reducer counts arrivals and trusts no graph split. Whatever is compiled, broken, eager or skipped, a bucket is
launched when all its gradients are there, and all ranks launch their buckets in plan order. Splits only decide how
early that is.
"""

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
from ddp_compile.errors import GradientArrivalError, warning_level
from ddp_compile.plan.builder import PlanBuilder
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.arrivals.accumulators import Accumulators
from ddp_compile.runtime.arrivals.backwards_alone import BackwardsAlone
from ddp_compile.runtime.arrivals.parameter_hooks import ParameterHooks
from ddp_compile.runtime.arrivals.policies import policy_for
from ddp_compile.runtime.arrivals.undefined_gradients import UndefinedGradients
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm
from ddp_compile.runtime.comm import error_messages, streams
from ddp_compile.runtime.comm.exchange import Exchange
from ddp_compile.runtime.desync.local_steps import LocalSteps
from ddp_compile.runtime.desync.monitor import DesyncMonitor
from ddp_compile.runtime.early_launch import EarlyLaunch
from ddp_compile.runtime.gradient_norm import GradientNorm
from ddp_compile.runtime.iteration_flags import IterationFlags
from ddp_compile.runtime.launch_queue import LaunchQueue
from ddp_compile.runtime.lifecycle import Event, Lifecycle, State, nothing_to_finalize
from ddp_compile.runtime.normalizer import Normalizer

log = logging.getLogger(__name__)


class Step:
    """The steps of one module. `Reducer` adds what other code asks or sets between them.

    Args:
        parameters: The parameters to reduce, in registration order, as ``builder.gradients`` lists them.
        builder: The module's plan; sealed at the first synchronized backward, before anything is launched.
        requires_sync: Returns whether this is outside ``no_sync``.
        has_launches: Returns whether a graph was compiled whose backward hands buckets over. None on every rank if none
            ever will be.
        on_reduced: Called when every ``.grad`` of an iteration is the mean, before the backward returns.
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
        requires_sync: Callable[[], bool],
        has_launches: Callable[[], bool] | None,
        on_reduced: Callable[[], None],
        on_plan_sealed: Callable[[BucketPlan], None],
    ) -> None:
        self.parameters = tuple(parameters)
        self.finalizes_manually = False  #: whether `finalize_manually` must be called after each backward
        self._monitor = monitor
        self._on_reduced = on_reduced
        self._on_plan_sealed = on_plan_sealed
        self._requires_sync = requires_sync
        self._has_warned = False  # of a forward or backward alone inside ``no_sync``
        self._has_launches = has_launches or (lambda: False)
        self._lifecycle = Lifecycle()
        self._set = BucketSet(self.parameters, builder, process_group, config, monitor)
        accumulators = Accumulators(self.parameters)
        self._undefined = UndefinedGradients(self._set, accumulators)
        self._policy = policy_for(config, self._set)
        self.normalizer = Normalizer(process_group, self.parameters[0].device, monitor)
        self._norm = GradientNorm(self._set)
        self._queue = LaunchQueue(self._set, monitor, algorithm, self._policy, self._undefined, self.normalizer)
        self._hooks = ParameterHooks(self.parameters, accumulators, self)
        self._early = EarlyLaunch(
            self._set, self._queue, self._hooks, accumulators, self._policy, has_launches is not None
        )
        self._flags = IterationFlags(self._set, self._queue, self._policy, self._early, monitor)
        self._queue.on_all_launched = self._flags.all_are_launched
        self._alone = BackwardsAlone(len(self.parameters))
        self._local_steps = LocalSteps(self.parameters)
        self._futures: list[torch.futures.Future[Any]] = []
        self._is_removed = False

    @property
    def is_between_steps(self) -> bool:
        """Whether no iteration is under way, and none was ended by an exception."""
        return self._lifecycle.phase.state in (State.ARMED, State.LOCAL)

    # A forward begins.

    def prepare_for_backward(self, synchronize: bool) -> None:
        """Before a forward, set whether a backward that follows it is reduced; if not, gradients accumulate locally.

        Raises a MissingGradientError if the previous backward left parameters without a gradient, and a ReductionError
        if it raised after its reduction had started.
        """
        if self._lifecycle.phase.state is State.LAUNCHED:
            raise error_messages.not_finalized("a forward")
        self._count_local_steps()
        if self._lifecycle.phase.state is State.INCOMPLETE:
            self._refuse_missing_gradients()
        if self.is_between_steps:
            self._watch_hooked_parameters()
            if synchronize:
                self._alone.forget()
        if self._lifecycle.on(Event.FORWARD if synchronize else Event.LOCAL_FORWARD) is State.FAILED:
            # Not waited for: ranks that stopped elsewhere may never join what this rank launched.
            raise error_messages.out_of_step()
        self._monitor.forwards.forward_begins()
        records, algorithm = self._queue.records, self._queue.algorithm
        records.forward_begins()
        self.normalizer.forward_begins()
        if synchronize and self._monitor.replicas.need_repair:
            with Exchange("broadcast of the parameters that most ranks have", self._monitor, records=records):
                self._monitor.replicas.repair(self.parameters, self._set.process_group)
        with Exchange(None, self._monitor, records=records):
            if algorithm.step_watch is not None:
                algorithm.step_watch.forward_begins(synchronize)
            algorithm.before_forward(synchronize)

    def forward_raised(self, synchronize: bool) -> None:
        """The forward that was announced by `prepare_for_backward` has raised, so it has no backward."""
        if torch_internals.current_graph_task_id() != -1:
            return  # a checkpoint's recomputation, which stops as soon as it has what it needs
        if synchronize:
            self._lifecycle.forward_raised()
        self.normalizer.forward_raised()

    def forward_returns(self, synchronize: bool) -> None:
        """The forward that was announced by `prepare_for_backward` has returned."""
        self.normalizer.forward_returns(synchronize)

    def search_unused_parameters(self, outputs: Any) -> None:
        """After a synchronized forward, find the parameters that no backward from its outputs can reach."""
        self._policy.search(outputs, weakref.WeakMethod(self._outputs_are_reached))

    def await_at_the_end(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Make the end of the next iteration wait for futures, for example of a buffer comm hook."""
        if done := [future for future in self._futures if future.done()]:
            torch.futures.wait_all(done)  # for their errors, since a forward need not have a backward
            self._futures = [future for future in self._futures if not future.done()]
        self._futures.extend(futures)

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

    # A gradient arrives.

    def mark_parameter_ready(self, index: int) -> None:
        """A gradient is in ``.grad``; raises a GradientArrivalError if it came twice, too late, or was removed."""
        self.hooks_have_run()
        for again in self._hooks.flush(index):
            self._arrive(again)
        self._arrive(index)

    def _arrive(self, index: int) -> None:
        phase = self._lifecycle.phase
        if self._early.arrived(index) and phase.state is not State.LAUNCHED:
            return
        if self._is_local:
            self._queue.algorithm.sharding.backward_begins()
            self.normalizer.gradients_arrive(lambda: self._hold_values(without=(index,)))
            self._note(index)
            if self._local_steps.gradient_arrives(index):
                self._compare_with_forward(is_reduced=False)
        elif not self._set.buckets and not phase.after_forward:
            self._note(index)
            self._alone.arrive(index)
            self._call_back_when_pass_ends(self._end_backward_alone)
        else:
            self._enter_backward((index,))
            self._count(index)

    @property
    def _is_local(self) -> bool:
        """Whether a gradient that comes now stays on this rank.

        It may be of a forward inside ``no_sync`` although another backward is expected, or has come already. If outputs
        of neither forward can be watched, it is taken for local as long as nothing has reached the other one.
        """
        lifecycle, forwards = self._lifecycle, self._monitor.forwards
        if lifecycle.phase.state is not State.ARMED:
            return lifecycle.phase.state is State.LOCAL
        if forwards.is_local is None:
            return lifecycle.had_local_forward and forwards.awaits_backward
        return forwards.is_local

    def _enter_backward(self, arriving: tuple[int, ...], is_computed: bool = False) -> None:
        """A backward has brought the gradients of these parameters. The first time, prepare for the rest."""
        before = self._lifecycle.phase.state
        if before is not State.REDUCING:
            self._start_iteration(arriving, is_computed)
            self._watch_hooked_parameters()  # again, since there may be new hooks
            self._queue.leave_out_unused()
        is_first_of_pass = self._call_back_when_pass_ends(self.finalize_backward)
        if is_first_of_pass and not self._set.notes_arrivals and not self._policy.counts_each:
            for bucket in self._queue.not_launched:
                self._hooks.batch(bucket, arriving)
        if before is not State.REDUCING:
            self._queue.do_without(self._policy.absent_from_the_start(arriving))

    def _start_iteration(self, arriving: tuple[int, ...] = (), is_computed: bool = False) -> None:
        """Enter an iteration, or enter it again, with a first gradient or with zeros in its place.

        ``is_computed`` tells whether AccumulateGrad has not seen the arriving gradients.
        """
        streams.refuse_capture(self.parameters[0].device, "a backward of a replicated module")
        self._queue.algorithm.sharding.backward_begins()
        before = self._lifecycle.phase.state
        # First, so that any later exception, even Ctrl-C during the agreement, is noticed.
        if self._lifecycle.on(Event.GRADIENT) is State.FAILED:
            if before is State.LAUNCHED:
                raise error_messages.not_finalized(f"a gradient of {self._set.names[arriving[0]]}")
            raise error_messages.out_of_step()
        if before is State.ARMED:
            self._count_local_steps()  # what comes now is reduced together with the local gradients
            self._compare_with_forward(is_reduced=True)
            self._monitor.backward_begins(self._lifecycle.phase.after_forward)
            self._queue.records.backward_begins()
            self.normalizer.gradients_arrive(lambda: self._hold_values(without=() if is_computed else arriving))
        if not self._set.buckets:
            self._seal()
        if before is State.ARMED:
            self._add_up_parameters()
        self._norm.forget_step()
        self.normalizer.backward_begins(self._set.iteration.is_shadow)

    def _count_local_steps(self) -> None:
        self._local_steps.end_watch()
        self._monitor.num_local_steps = self._local_steps.num_found

    def _compare_with_forward(self, is_reduced: bool) -> None:
        """A backward begins: warn once if of forward and backward only one is inside ``no_sync``."""
        if self._requires_sync() != is_reduced and not self._has_warned:
            self._has_warned = True
            log.log(warning_level(self._set.process_group), "%s", error_messages.half_in_no_sync(is_reduced))

    def _seal(self) -> None:
        """Agree on all that the ranks have to know before the first launch."""
        is_counting, is_shadow = self.normalizer.is_counting, self._set.iteration.is_shadow
        own = (self._early.is_enabled and self._has_launches(), is_counting, not is_counting and not is_shadow)
        plan, (_, is_any_counting, is_any_not_counting) = self._set.seal(self._queue.algorithm.name, own)
        self.normalizer.agree(is_any_counting, is_any_not_counting)
        self._on_plan_sealed(plan)

    def _add_up_parameters(self) -> None:
        """For Note [Replicas], unless parameters may differ between the ranks on purpose."""
        algorithm, monitor = self._queue.algorithm, self._monitor
        are_equal = algorithm.traits.has_equal_replicas and not monitor.is_paused and not self._local_steps.num_found
        if are_equal and monitor.replicas.are_compared_in(self._set.iteration.number):
            algorithm.sharding.await_parameters()
            monitor.replicas.add_up([dict(zip(b.names, b.parameters, strict=True)) for b in self._set.buckets])

    def holds_gradients(self) -> bool:
        """Whether any parameter has a ``.grad``, or a gradient in shards."""
        return any(p.grad is not None for p in self.parameters) or self._queue.algorithm.sharding.holds_gradients()

    def _hold_values(self, without: Sequence[int]) -> bool:
        """Whether anything but zeros is in the ``.grad`` of other parameters than these, or in shards."""
        kept = (p.grad for i, p in enumerate(self.parameters) if p.grad is not None and i not in without)
        values = (torch_internals.sparse_values(grad) if grad.is_sparse else grad for grad in kept)
        return any(map(Tensor.any, values)) or self._queue.algorithm.sharding.holds_gradients()

    def _note(self, index: int) -> bool:
        """Record what a parameter holds on arrival; returns whether its gradient is undefined."""
        is_undefined = self._undefined.arrive(index)
        if not is_undefined:
            self._policy.note(index)
        return is_undefined

    def _count(self, index: int) -> None:
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

    def hooks_have_run(self, *_: object) -> None:
        """All hooks on the parameter that arrived last have run: launch the buckets that it completes, in their turn.

        `LaunchQueue.complete` flattens a bucket, and launches what is ready.
        """
        buckets = self._set.iteration.with_running_hooks
        while buckets:
            self._queue.complete(buckets.pop(0))

    # A compiled backward has computed a whole bucket. The operators of `ddp_compile.graph_ops` call these.

    def mark_bucket_ready(self, param_indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Launch a bucket if that is safe. Otherwise its parameters' hooks will.

        ``gradients``, which the backward will return, are those of the parameters in the bucket's order. They are only
        read. AccumulateGrad has not seen them yet, and others may follow: Note [Launched before AccumulateGrad].
        """
        if self._may_launch_early(tuple(param_indices), moves=False):
            bucket = self._set.of_param_indices[tuple(param_indices)]
            self._early.launch(bucket, gradients, moves=False)

    def move_bucket(self, param_indices: Sequence[int], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """`mark_bucket_ready` for a backward that can return other tensors than it has computed.

        The gradients are not used after this. Returns what the backward returns: views into the flat buffer, or copies
        if the bucket is not launched now or has not been launched early before.
        """
        is_launched = self._may_launch_early(tuple(param_indices), moves=True)
        if is_launched:
            bucket = self._set.of_param_indices[tuple(param_indices)]
            if self._early.can_move(bucket):
                return self._early.move(bucket, gradients)
        pairs = zip(param_indices, gradients, strict=True)
        copies = [torch.empty_like(self.parameters[index]).copy_(gradient) for index, gradient in pairs]
        if is_launched:
            self._early.launch(bucket, copies, moves=True)
        return copies

    def _may_launch_early(self, param_indices: tuple[int, ...], moves: bool) -> bool:
        """Whether a computed bucket is launched now; then the backward has begun."""
        phase = self._lifecycle.phase
        is_alone = not self._set.buckets and not phase.after_forward  # see `BackwardsAlone`
        if self._is_removed or not self._queue.sends or is_alone or phase.state is State.FAILED or self._is_local:
            return False
        self.hooks_have_run()
        for again in self._hooks.flush(param_indices[0]):
            self._arrive(again)
        self.hooks_have_run()
        if not self._early.is_safe(param_indices, moves):
            return False
        self._enter_backward(param_indices, is_computed=True)
        # The bucket may be of another plan, or launched without parameters that no output led to.
        bucket = self._set.of_param_indices.get(param_indices)
        return bucket is not None and bucket.is_pending and bucket.may_launch_early

    # The backward ends.

    def finalize_backward(self) -> None:
        """Wait for every bucket and hand over its gradients. Runs when a backward pass has ended.

        With a reentrant checkpoint, passes end inside the backward, which is over only when every bucket has been
        launched.

        Raises:
            ReductionError: A reduction failed or timed out.
            GradientArrivalError: A bucket was launched too early and cannot be launched again.
        """
        if self._lifecycle.phase.state is not State.REDUCING:
            return  # a pass inside this one has seen the last gradient
        self.hooks_have_run()
        for again in self._hooks.flush_all():
            self._arrive(again)
        self.hooks_have_run()
        if not self._queue.all_launched:
            if torch_internals.is_inside_backward() and not self._policy.is_last_pass():
                return  # later passes queue their own callbacks
            if not self._queue.complete_missing_as_unused(self._lifecycle.phase.after_forward):
                # Another backward may bring the rest, but users must not see a gradient that is still being reduced.
                self._queue.wait()
                self._monitor.backward_is_incomplete()
                self._early.expose_partial_means()
                self._lifecycle.on(Event.LEFT_OUT)
                return
        if self.finalizes_manually:
            self._flags.send()
            self._lifecycle.on(Event.ALL_LAUNCHED)
        else:
            self._finish_iteration()

    def finalize_manually(self) -> None:
        """Finish the reductions of the backward that has ended. Raises like `finalize_backward`, or if none wait."""
        state = self._lifecycle.phase.state
        if state is not State.LAUNCHED:
            raise nothing_to_finalize(self.finalizes_manually, state)
        self._lifecycle.on(Event.FINALIZE)  # first, so that any later exception is noticed
        self._finish_iteration()

    def shadow_backward(self) -> None:
        """Inside ``Join``, join the other ranks' backward with zeros, after `prepare_for_backward`.

        Raises like `finalize_backward`, or a ReplicationError if this rank has not learned which gradients come.
        """
        self._policy.refuse_shadow()
        self._set.iteration.is_shadow = True
        self._start_iteration()
        self._queue.launch_shadows()
        self._finish_iteration()

    def _finish_iteration(self) -> None:
        """Wait for the buckets, which are all launched, and hand over their gradients."""
        iteration = self._set.iteration
        try:
            self._flags.receive()  # launches those again that were launched too early
            self._queue.finish(self._policy.used_by_nobody)
            if self._futures:
                futures, self._futures = self._futures, []
                torch.futures.wait_all(futures)
            if iteration.is_whole:
                self._queue.after_backward()
        except GradientArrivalError:
            self._begin_iteration()  # so that training can continue
            raise
        records, algorithm = self._queue.records, self._queue.algorithm
        records.gradients_are_handed_over()
        if iteration.is_whole and not iteration.is_shadow:
            with algorithm.using_parameters(trains=False):
                self._on_reduced()
        is_of_all = iteration.met_others or self._queue.world_size == 1
        if is_of_all:
            assert self._set.plan is not None
            records.iteration_ends(self._set.plan)
        self._begin_iteration()
        if is_of_all:
            # Not before the next forward, in which a rank may be alone.
            if not algorithm.traits.keeps_buckets:
                self._set.rebuild_once()
        elif not algorithm.traits.in_step:
            self._set.rebuild_never()
        records.exchange_if_due()

    def _begin_iteration(self) -> None:
        self.normalizer.step_ends()
        self._set.begin_iteration()
        self._queue.records.iteration_begins(self._set.iteration.number)
        self._monitor.iteration_ends(self._set.iteration.number)
        self._hooks.notify_of_each()
        self._lifecycle.on(Event.ITERATION_ENDS)  # last, so that a cut-short end is not taken for complete

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

    def _end_backward_alone(self) -> None:
        """End a backward that came before any call of the module; see `BackwardsAlone`."""
        if torch_internals.is_inside_backward():
            return
        if self._lifecycle.phase.state is State.LOCAL:  # a hook called the module inside no_sync
            self._alone.forget()
        elif arrived := self._alone.backward_ends():
            self._start_iteration(tuple(arrived))
            for index in arrived:
                self._set.note_arrival(index)
            for index, bucket in enumerate(self._set.of_parameter):
                self._policy.counts(bucket, index, is_undefined=self.parameters[index].grad is None)
            for bucket in self._set.buckets:
                self._queue.complete(bucket)
            self.finalize_backward()
