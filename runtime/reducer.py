"""The reducer: counts gradients as they arrive, launches ready buckets in plan order, hands the means back.

Note [Correctness belongs to the reducer]
The reducer counts arrivals and trusts no graph split. Whatever is compiled, broken, eager or skipped, a bucket is
launched when all its gradients are there, and buckets are launched in plan order on every rank. Splits only decide how
early that is.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.errors import GradientArrivalError, NonFiniteGradientError, ReductionError
from ddp_compile.plan.builder import PlanBuilder
from ddp_compile.runtime.arrivals.accumulators import Accumulators
from ddp_compile.runtime.arrivals.backward_passes import BackwardPasses, BackwardsAlone
from ddp_compile.runtime.arrivals.gradient_arrivals import GradientArrivals
from ddp_compile.runtime.arrivals.parameter_hooks import ParameterHooks
from ddp_compile.runtime.arrivals.policies import policy_for
from ddp_compile.runtime.arrivals.undefined_gradients import UndefinedGradients
from ddp_compile.runtime.bucket_receiver import BucketReceiver
from ddp_compile.runtime.buckets.bucket import Bucket, drop_gradients
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm
from ddp_compile.runtime.buckets.reducer_settings import ReducerSettings
from ddp_compile.runtime.comm import error_messages, streams
from ddp_compile.runtime.early_launch import EarlyLaunch, NoEarlyLaunch
from ddp_compile.runtime.host_memory import keep_freed_memory
from ddp_compile.runtime.iteration_end import IterationEnd
from ddp_compile.runtime.launch_queue import LaunchQueue
from ddp_compile.runtime.lifecycle import Event, Lifecycle, Phase, State, nothing_to_finalize


class Reducer:
    """Averages the gradients of one module over the ranks of a process group.

    Args:
        parameters: The parameters to reduce, in registration order, as ``builder.gradients`` lists them.
        builder: The module's plan; sealed at the first synchronised backward, before anything is launched.
        process_group: The ranks to average over.
        settings: See `ReducerSettings`.

    Source: the life of a backward (prepare, mark ready, launch in order, finalise in an engine callback) is that of
    ``Reducer`` in torch 2.13, csrc/distributed/c10d/reducer.cpp.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        builder: PlanBuilder,
        process_group: dist.ProcessGroup,
        settings: ReducerSettings,
    ) -> None:
        self.parameters = tuple(parameters)
        self.builder = builder
        self.settings = settings
        self.rank = process_group.rank()
        self._monitor = settings.monitor
        self._lifecycle = Lifecycle()
        self._bucket_set = BucketSet(self.parameters, builder, process_group, settings)
        names = [gradient.fqn for gradient in builder.gradients]
        accumulators = Accumulators(self.parameters)
        self._undefined = UndefinedGradients(self.parameters, accumulators, names, self.rank)
        self._policy = policy_for(settings, self.parameters, names, self.rank)
        self._queue = LaunchQueue(
            self._bucket_set, process_group, settings.monitor, settings.algorithm, self._policy, self._undefined
        )
        self._hooks = ParameterHooks(self.parameters, accumulators, self)
        self._arrivals = GradientArrivals(
            self._bucket_set, self._hooks, self._policy, self._undefined, self._queue.complete, names, self.rank
        )
        self._early = NoEarlyLaunch()
        if settings.launches_in_backward:
            self._early = EarlyLaunch(self._bucket_set, self._queue, self._hooks, accumulators, self.rank)
        #: Told of the buckets that compiled backwards have computed.
        self.receiver = BucketReceiver(self._bucket_set, self._queue, self._hooks, self._early, self._lifecycle, self)
        self._end = IterationEnd(
            self._bucket_set, self._queue, self._policy, self._early, settings, names, process_group
        )
        self._queue.on_all_launched = self._end.all_are_launched
        self.finalizes_manually = False  #: whether `finalize_manually` has to be called behind each backward
        self._passes = BackwardPasses()
        self._alone = BackwardsAlone(len(self.parameters), self.rank)
        if any(parameter.is_cpu for parameter in self.parameters):
            keep_freed_memory()

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets in plan order; none until the plan is sealed."""
        return self._bucket_set.buckets

    @property
    def early_buckets(self) -> Sequence[Bucket]:
        """Those that are launched as soon as a compiled backward has computed them, in plan order."""
        return [bucket for bucket in self.buckets if bucket.may_launch_early]

    @property
    def algorithm(self) -> CommAlgorithm:
        """How the buckets are reduced."""
        return self._queue.algorithm

    def agree_on_algorithm(self, algorithm: CommAlgorithm, always: bool = False) -> None:
        """Before `set_algorithm`: find out whether all ranks are about to do so; nothing is changed.

        Args:
            algorithm: The other way.
            always: Before the first backward as well, which otherwise compares by itself.

        Raises:
            RuntimeError: A backward has not been completed.
            RanksDifferError: After the first backward, another rank does otherwise.
        """
        if not self.is_between_steps:
            raise error_messages.algorithm_in_backward(algorithm.name)
        if self.buckets or always:
            self._monitor.agree_on_algorithm(algorithm.name)

    def set_algorithm(self, algorithm: CommAlgorithm) -> None:
        """Reduce in another way from the next backward on; nothing of the one before is under way."""
        self._queue.algorithm = algorithm
        self._bucket_set.lay_out_as(algorithm.traits.layout)

    # A forward.

    def refuse_capture(self, what: str) -> None:
        """Raise a ReplicationError while a graph is being captured: its replays would bypass the reducer.

        Args:
            what: What was called; nothing of it has been sent yet.
        """
        streams.refuse_capture(self.parameters[0].device, self.rank, what)

    def prepare_for_backward(self, synchronize: bool) -> None:
        """Say before a forward whether a backward that follows it is to be reduced.

        Args:
            synchronize: False inside ``no_sync``: gradients accumulate locally.

        Raises:
            MissingGradientError: The backward before left parameters without a gradient.
            ReductionError: The backward before raised after its reduction had started.
        """
        self._refuse_unfinalized()
        if self._lifecycle.phase.state is State.INCOMPLETE:
            self._refuse_missing_gradients()
        if self.is_between_steps:
            self._undefined.watch_all(self._hooks.with_hooks_of_others())
            if synchronize:
                self._alone.forget()
                if self.buckets and not self._lifecycle.phase.after_forward and not self.algorithm.traits.keeps_buckets:
                    self._bucket_set.rebuild_once()
        if self._lifecycle.on(Event.FORWARD if synchronize else Event.LOCAL_FORWARD) is State.FAILED:
            # What this rank launched may wait for ever for ranks that stopped elsewhere, so it is not waited for.
            raise error_messages.out_of_step()
        try:
            if synchronize:
                self.algorithm.before_forward()
            else:
                self.algorithm.before_local_forward()
        except ReductionError as error:
            raise self._monitor.report_failure(error) from error.__cause__

    def search_unused_parameters(self, outputs: Any) -> None:
        """After a synchronised forward, find the parameters that no backward from its outputs can reach.

        Args:
            outputs: What the forward returned.
        """
        self._policy.search(outputs, weakref.WeakMethod(self._outputs_are_reached))

    def await_at_the_end(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        """Let the end of the next iteration wait for these, of a buffer comm hook for example."""
        self._end.await_also(futures)

    # Inside ``Join``; see `ddp_compile.features.uneven_inputs`.

    def refuse_second_forward(self) -> None:
        """Raise a ReplicationError if a forward has come whose backward is to be reduced, and has not."""
        self._refuse_unfinalized()
        if self._lifecycle.phase == Phase(State.ARMED, True):
            raise error_messages.second_forward_in_join()

    def enter_join(self, divisor: int) -> None:
        """Divide by this from now on, and compare no fingerprints: the ranks do different things by intention."""
        self._queue.divisor = divisor
        self._monitor.is_paused = True

    def leave_join(self) -> None:
        """All ranks train again."""
        self._queue.divisor = self._queue.world_size
        self._monitor.is_paused = False

    def shadow_backward(self) -> None:
        """Take part in what a backward of the other ranks sends, with zeros; after `prepare_for_backward`.

        Raises:
            ReductionError: A reduction failed or timed out.
            ReplicationError: With a static graph, this rank has not learnt which gradients come.
        """
        self._policy.refuse_shadow()
        if self._lifecycle.on(Event.GRADIENT) is State.FAILED:
            raise error_messages.out_of_step()
        self._monitor.backward_begins(after_forward=True)
        if not self.buckets:
            self._seal_plan()
        self._queue.launch_shadows()
        self._finish_iteration()

    # A gradient arrives.

    def mark_parameter_ready(self, index: int) -> None:
        """Note that a parameter's gradient has been accumulated into ``.grad`` for this backward.

        Raises:
            GradientArrivalError: It had arrived before in the same iteration, was taken for unused, or has been taken
                away.
        """
        self.hooks_have_run()
        self._hooks.flush(index)
        if self._early.arrived(index) and self._lifecycle.phase.state is not State.LAUNCHED:
            return
        if self._lifecycle.phase.state is State.LOCAL:
            self._arrivals.note(index)
        elif not self.buckets and not self._lifecycle.phase.after_forward:
            self._arrivals.note(index)
            self._alone.note(index)
            self._passes.call_back_at_the_end(self._finalize_backward_without_plan)
        else:
            self.enter_backward((index,))
            self._arrivals.arrive(index)

    def hooks_have_run(self) -> None:
        """See `GradientArrivals.hooks_have_run`."""
        self._arrivals.hooks_have_run()

    def enter_backward(self, arriving: tuple[int, ...]) -> None:
        """A backward has brought something; the first time in each, get ready for the rest.

        Args:
            arriving: The parameters whose gradients are there.
        """
        before = self._lifecycle.phase.state
        if before is not State.REDUCING:
            self.refuse_capture("a backward of a replicated module")
            # First of all: an exception from now on, Ctrl-C in the middle of the agreement even, must not pass unseen.
            failed = self._lifecycle.on(Event.GRADIENT) is State.FAILED
            if before is State.LAUNCHED:
                raise error_messages.not_finalized(f"a gradient of {self._fqn(arriving[0])}")
            if failed:
                raise error_messages.out_of_step()
            self._undefined.watch_all(self._hooks.with_hooks_of_others())  # once more: hooks may be new
        if before is State.ARMED:
            self._monitor.backward_begins(self._lifecycle.phase.after_forward)
        if not self.buckets:
            self._seal_plan()
        if before is not State.REDUCING:
            self._queue.leave_out_unused()
        begins = self._passes.call_back_at_the_end(self.finalize_backward)
        learns = self._bucket_set.notes_arrivals or (self._early.is_learning and self._queue.sends)
        if begins and not (learns or self._policy.counts_each):
            for bucket in self._queue.not_launched:
                self._hooks.batch(bucket, arriving)
        if absent := self._policy.absent_from_the_start(arriving):
            self._queue.do_without(absent)

    def _seal_plan(self) -> None:
        self.settings.on_plan_sealed(self._bucket_set.seal(self.algorithm.name))

    # The backward ends.

    def finalize_backward(self) -> None:
        """Wait for every bucket and hand its gradients over; runs when a backward pass has ended.

        A reentrant checkpoint ends passes inside the backward; only when every bucket has been launched is the backward
        over.

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
                return  # the passes to come queue callbacks of their own
            if not self._queue.complete_without_the_missing(self._lifecycle.phase.after_forward):
                # Another backward may bring the rest, but nobody may meet a gradient that is still being reduced.
                self._queue.wait()
                self._monitor.backward_is_incomplete()
                self._early.hand_over_for_now()
                self._lifecycle.on(Event.LEFT_OUT)
                return
        if self.finalizes_manually:
            self._end.tell_the_others()
            self._lifecycle.on(Event.ALL_LAUNCHED)
        else:
            self._finish_iteration()

    def require_manual_finalization(self, required: bool) -> None:
        """Set `finalizes_manually`; raises RuntimeError while a backward has not been completed."""
        if not self.is_between_steps:
            raise error_messages.manual_finalization_in_backward(required)
        self.finalizes_manually = required

    def finalize_manually(self) -> None:
        """Wait for the reductions of the backward that has ended, and hand the gradients over.

        Raises:
            RuntimeError: No backward has launched anything that is not waited for by itself.
            ReductionError, GradientArrivalError: As `finalize_backward`.
        """
        state = self._lifecycle.phase.state
        if state is not State.LAUNCHED:
            raise nothing_to_finalize(self.finalizes_manually, state)
        self._lifecycle.on(Event.FINALIZE)  # first: what raises from now on must not pass unseen
        self._finish_iteration()

    def remove_hooks(self) -> None:
        """Stop listening to the parameters, and drop the gradients of an iteration that an exception has cut short.

        Some of those are means and some this rank's own, and a reduction that is under way may still write to them.
        """
        self._hooks.remove()
        self.receiver.stop()
        if self._lifecycle.phase.state in (State.REDUCING, State.LAUNCHED, State.FAILED):
            drop_gradients(self.parameters)

    @property
    def is_between_steps(self) -> bool:
        """Whether no iteration is under way, nor has ended by an exception."""
        return self._lifecycle.phase.state in (State.ARMED, State.LOCAL)

    def _outputs_are_reached(self) -> None:
        """The first iteration of a static graph ends with this pass, even if all gradients come in passes inside it."""
        self._passes.call_back_at_the_end(self.finalize_backward)

    def _finalize_backward_without_plan(self) -> None:
        """End a backward that came before any call of the module; see `BackwardsAlone`."""
        if torch_internals.is_inside_backward():
            return
        self._passes = BackwardPasses()
        if self._lifecycle.phase.state is State.LOCAL:  # a hook has called the module inside no_sync
            self._alone.forget()
            return
        if not self._alone.backward_ends():
            return
        self.refuse_capture("a backward of a replicated module")
        if self._lifecycle.on(Event.GRADIENT) is State.FAILED:
            raise error_messages.out_of_step()
        self._monitor.backward_begins(after_forward=False)
        self._seal_plan()
        for index, bucket in enumerate(self._bucket_set.of_parameter):
            self._policy.counts(bucket, index, is_undefined=self.parameters[index].grad is None)
        for bucket in self.buckets:
            self._queue.complete(bucket)
        self.finalize_backward()

    def _refuse_unfinalized(self) -> None:
        if self._lifecycle.phase.state is State.LAUNCHED:
            raise error_messages.not_finalized("a forward")

    def _refuse_missing_gradients(self) -> NoReturn:
        missing = {self._fqn(index): self.parameters[index] for index in self._queue.missing}
        try:
            self._queue.wait()
        finally:
            self._begin_iteration()
        raise error_messages.missing_gradients(missing, len(self.parameters), self.settings.static_graph)

    # The iteration ends.

    def _finish_iteration(self) -> None:
        """Every bucket is launched: wait for them, and hand their gradients over."""
        try:
            self._end.finish()
        except (GradientArrivalError, NonFiniteGradientError):
            self._begin_iteration()  # the next one can be trained
            raise
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        """Replace all that belongs to the iteration that has ended; here alone."""
        has_launched = self._queue.has_launched
        self._monitor.iteration_ends(has_launched or self._queue.is_exchange)
        self._early.begin_iteration(has_launched)
        self._queue.begin_iteration()
        self._hooks.notify_of_each()
        self._arrivals.begin_iteration()
        self._passes = BackwardPasses()
        self._policy.begin_iteration()
        self._undefined.begin_iteration()
        self._lifecycle.on(Event.ITERATION_ENDS)  # last: what Ctrl-C leaves half done is not begun anew

    def _fqn(self, index: int) -> str:
        return self.builder.gradients[index].fqn
