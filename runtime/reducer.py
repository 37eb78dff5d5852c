"""The reducer: counts gradients as they arrive, sends full buckets in plan order, hands the means back.

Note [Correctness belongs to the reducer]
The reducer counts arrivals and trusts no graph split. Whatever is compiled, broken, eager or skipped, a bucket leaves
when all its gradients are there, and buckets leave in plan order on every rank. Splits only decide how early that is.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.plan_builder import PlanBuilder
from ddp_compile.runtime import refusals
from ddp_compile.runtime.accumulators import Accumulators
from ddp_compile.runtime.algorithms.base import CommAlgorithm
from ddp_compile.runtime.bucket_buffer import BucketBuffer, BucketState
from ddp_compile.runtime.bucket_offer import OfferRole
from ddp_compile.runtime.bucket_set import BucketSet
from ddp_compile.runtime.completion import Completion
from ddp_compile.runtime.early_buckets import EarlyBuckets, Verdict
from ddp_compile.runtime.host_memory import keep_freed_memory
from ddp_compile.runtime.launch_queue import LaunchQueue
from ddp_compile.runtime.lifecycle import Event, Lifecycle, State
from ddp_compile.runtime.optional_gradients import OptionalGradients, StaticGraph
from ddp_compile.runtime.parameter_hooks import ParameterHooks
from ddp_compile.runtime.reducer_settings import ReducerSettings
from ddp_compile.runtime.round_message import RoundMessage
from ddp_compile.runtime.undefined_gradients import UndefinedGradients

log = logging.getLogger(__name__)


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
        self.process_group = process_group
        self.settings = settings
        self._progress = settings.progress
        self.rank = process_group.rank()
        self._lifecycle = Lifecycle()
        # With `find_unused_parameters` one round says nothing about the next.
        is_typical = settings.static_graph or not settings.find_unused_parameters
        self._bucket_set = BucketSet(
            self.parameters, builder, process_group, settings.gradient_as_bucket_view, settings.progress, is_typical
        )
        self._queue = LaunchQueue(self._bucket_set, process_group, settings.progress, settings.algorithm)
        self._tasks_with_callback: set[int] = set()
        self._arrived_before_plan: set[int] = set()
        self._num_backwards_alone = 0
        accumulators = Accumulators(self.parameters)
        self._early = EarlyBuckets(self.parameters, accumulators, self.rank) if settings.takes_whole_buckets else None
        is_needed = settings.takes_whole_buckets or settings.find_unused_parameters or settings.static_graph
        self._message = RoundMessage(process_group, self.parameters[0].device, is_needed)
        if any(parameter.is_cpu for parameter in self.parameters):
            keep_freed_memory()
        self._optional: OptionalGradients | None = None
        names = [gradient.fqn for gradient in builder.gradients]
        if settings.static_graph or settings.find_unused_parameters:
            kind = StaticGraph if settings.static_graph else OptionalGradients
            self._optional = kind(self.parameters, names, self.rank)
        self._undefined = UndefinedGradients(self.parameters, accumulators, names, self.rank)
        self._completion = Completion(
            self._bucket_set,
            self._queue,
            self._optional,
            self._early,
            self._undefined,
            weakref.WeakMethod(self._all_have_left),
        )
        self._hooks = ParameterHooks(self.parameters, accumulators, self)
        self._with_running_hooks: list[BucketBuffer] = []  # whose last gradient is there, and may still be changed

    @property
    def buckets(self) -> Sequence[BucketBuffer]:
        """The buckets in plan order; none until the plan is sealed."""
        return self._bucket_set.buckets

    @property
    def algorithm(self) -> CommAlgorithm:
        """How the buckets are reduced."""
        return self._queue.algorithm

    def register_comm_hook(self, hook: CommAlgorithm) -> None:
        """Let a hook reduce the buckets, and divide, from the next backward on.

        Raises:
            RuntimeError: A hook is registered already, another algorithm reduces, or a backward has not been completed.
            RanksDifferError: After the first backward, another rank registered another hook or none.
        """
        if not self.algorithm.gives_way_to_comm_hook:
            raise refusals.second_algorithm(self.rank, hook.name, self.algorithm.name)
        if self._lifecycle.phase.state not in (State.ARMED, State.LOCAL):
            raise refusals.comm_hook_in_backward(self.rank, hook.name)
        if self.buckets:
            self._progress.agree_on_algorithm(hook.name)
        self._queue.algorithm = hook
        self._bucket_set.lay_out_as(hook.traits.layout)

    def prepare_for_backward(self, synchronize: bool) -> None:
        """Say before a forward whether a backward that follows it is to be reduced.

        Args:
            synchronize: False inside ``no_sync``: gradients accumulate locally.

        Raises:
            MissingGradientError: The backward before left parameters without a gradient.
            ReductionError: The backward before raised after its reduction had started.
        """
        if self._lifecycle.phase.state is State.INCOMPLETE:
            self._refuse_missing_gradients()
        if self._lifecycle.phase.state in (State.ARMED, State.LOCAL):
            self._watch_where_others_have_hooks()
            if synchronize:
                self._arrived_before_plan.clear()
                if self.buckets and not self._lifecycle.phase.after_forward:
                    self._bucket_set.rebuild_once()
        if self._lifecycle.on(Event.FORWARD if synchronize else Event.LOCAL_FORWARD) is State.FAILED:
            # What this rank launched may wait for ever for ranks that stopped elsewhere, so it is not waited for.
            raise refusals.out_of_step(self.rank)

    def search_unused_parameters(self, outputs: Any) -> None:
        """After a synchronised forward, find the parameters that no backward from its outputs can reach.

        Args:
            outputs: What the forward returned.
        """
        if self._optional is not None:
            self._optional.search(outputs, weakref.WeakMethod(self._outputs_are_reached))

    def mark_parameter_ready(self, index: int) -> None:
        """Note that a parameter's gradient has been accumulated into ``.grad`` for this backward.

        Raises:
            GradientArrivalError: It had arrived before in the same round, was taken for unused, or has been taken away.
        """
        self.hooks_have_run()
        self._hooks.settle(index)
        if self._early is not None and self._early.arrived(index):
            return
        if self._lifecycle.phase.state is State.LOCAL:
            self._note(index)
        elif not self.buckets and not self._lifecycle.phase.after_forward:
            self._note(index)
            self._arrived_before_plan.add(index)
            self._call_back_at_the_end(self._finalize_backward_without_plan)
        else:
            self._enter_backward((index,))
            self._arrive(index)

    def hooks_have_run(self) -> None:
        """All hooks on the parameter that has arrived last have run: what is complete now can leave."""
        while self._with_running_hooks:
            self._completion.complete(self._with_running_hooks.pop(0))

    def mark_bucket_ready(self, parameters: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Take note that a compiled backward has computed a whole bucket, and let it leave if that is safe.

        Nobody has seen the gradients yet, and they may not be all that comes; Note [Leaving before AccumulateGrad] in
        `early_buckets` says when the bucket leaves. Otherwise it leaves when its parameters' hooks have run.

        Args:
            parameters: The bucket's parameters in its order.
            gradients: Their gradients, which the backward goes on to return; they are only read.
        """
        self._take_bucket(tuple(parameters), gradients, moves=False)

    def move_bucket(self, parameters: Sequence[int], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """`mark_bucket_ready` for a backward that returns other tensors than those it has computed.

        Args:
            parameters: The bucket's parameters in its order.
            gradients: Their gradients, which are needed no more after this.

        Returns:
            What the backward is to return: views into the flat buffer if the bucket leaves now, copies otherwise.
        """
        return self._take_bucket(tuple(parameters), gradients, moves=True)

    def ignore_offers(self, buckets: Sequence[tuple[int, ...]]) -> None:
        """Let these buckets wait for their hooks from now on, whatever graphs offer.

        Args:
            buckets: The parameters of each, in its order.
        """
        if self._early is not None:
            self._early.ignore(buckets)

    def finalize_backward(self) -> None:
        """Wait for every bucket and hand its gradients over; runs when a backward pass has ended.

        A reentrant checkpoint ends passes inside the backward; only when every bucket has left is the backward over.

        Raises:
            ReductionError: An all-reduce failed or timed out.
            GradientArrivalError: A bucket has left too early and cannot be sent again.
        """
        if self._lifecycle.phase.state is not State.REDUCING:
            return  # a pass inside this one has seen the last gradient
        self.hooks_have_run()
        self._hooks.settle_all()
        self.hooks_have_run()
        if not self._queue.all_gone:
            if torch_internals.is_inside_backward() and not (self._optional and self._optional.is_last_pass()):
                return  # the passes to come queue callbacks of their own
            if not self._completion.complete_without_the_missing(self._lifecycle.phase.after_forward):
                # Another backward may bring the rest, but nobody may meet a gradient that is still being reduced.
                self._queue.wait()
                self._progress.backward_is_incomplete()
                if self._early is not None:
                    self._early.hand_over_for_now(self.buckets)
                self._lifecycle.on(Event.LEFT_OUT)
                return
        self._finish_round()

    def remove_hooks(self) -> None:
        """Stop listening to the parameters, and drop the gradients of a round that an exception has cut short.

        Some of those are means and some this rank's own, and an all-reduce that is under way may still write to them.
        """
        self._hooks.remove()
        self._early = None  # a backward that is still to come has the operators in it
        if self._lifecycle.phase.state in (State.REDUCING, State.FAILED):
            for parameter in self.parameters:
                parameter.grad = None

    # What follows is private.

    def _note(self, index: int) -> bool:
        """Take note of what a parameter holds on arrival; returns whether its gradient is undefined."""
        is_undefined = self._undefined.arrive(index)
        if self._optional is not None and not is_undefined:
            self._optional.note(index)
        return is_undefined

    def _watch_where_others_have_hooks(self) -> None:
        """Before a forward, so that it holds for the first gradient too; and as a backward begins, for later hooks."""
        for index in self._hooks.with_hooks_of_others():
            self._undefined.watch(index)

    def _arrive(self, index: int) -> None:
        """A parameter has arrived; other hooks on it and on its node may be about to change its gradient."""
        is_undefined = self._note(index)
        self._bucket_set.note_arrival(index)
        bucket = self._bucket_set.of_parameter[index]
        has_left = bucket.state is not BucketState.COLLECTING
        if self._optional is not None and self._optional.settles(index, has_left, is_undefined):
            return
        if index not in bucket.missing:
            raise refusals.arrived_twice(self.rank, self._fqn(index))
        if bucket.arrive(index):
            self._hooks.note_last(index)
            self._hooks.tell_behind(index)
            self._with_running_hooks.append(bucket)

    def _take_bucket(self, members: tuple[int, ...], gradients: Sequence[Tensor], moves: bool) -> Sequence[Tensor]:
        """Let a bucket leave if that is safe; returns what stands for its gradients from now on."""
        role, bucket = self._role_of_offer(members, moves)
        if role is OfferRole.WAITS or self._early is None or bucket is None:
            return self._copies(members, gradients) if moves else gradients
        if role is OfferRole.TEACHES:
            returned = self._copies(members, gradients) if moves else gradients
            self._early.follow(members, returned, role, moves=False)
            return returned
        is_looked_at = role is OfferRole.LEAVES_IN_SIGHT
        is_moved = moves and not is_looked_at
        bucket.claim(bucket.gradients())  # while ``.grad`` says which views are gradients
        returned = bucket.new_views() if is_moved else self._copies(members, gradients) if moves else gradients
        self._early.follow(members, returned, role, moves=is_moved)
        if is_looked_at and self._can_be_sent_again(moves):
            self._early.expect_to_send_again(members)
        self._completion.complete_with(bucket, self._early.contributions(bucket, gradients if is_moved else None))
        if is_moved:
            bucket.release_flattened()
        self._hooks.gather(members, self._early.awaited(members), tell_of_last=False)
        return returned

    def _role_of_offer(self, members: tuple[int, ...], moves: bool) -> tuple[OfferRole, BucketBuffer | None]:
        """What becomes of a bucket that a graph offers; the backward has begun unless it waits."""
        early = self._early
        if early is None or not self._queue.sends or self._lifecycle.phase.state in (State.LOCAL, State.FAILED):
            return OfferRole.WAITS, None
        if not self.buckets and not self._lifecycle.phase.after_forward:
            return OfferRole.WAITS, None  # see `_finalize_backward_without_plan`
        self.hooks_have_run()
        self._hooks.settle(members[0])
        self.hooks_have_run()
        role = early.offer(members, self._can_be_sent_again(moves))
        if role is OfferRole.WAITS:
            return role, None
        self._enter_backward(members)
        bucket = self._bucket_set.of_parameter[members[0]]
        # It may have left without what a forward's outputs did not lead to. Compiled code expects aligned results; a
        # comm hook leaves no room between the places.
        if bucket.state is not BucketState.COLLECTING or (moves and not bucket.is_aligned):
            return OfferRole.WAITS, None
        return role, bucket

    def _can_be_sent_again(self, moves: bool) -> bool:
        return not moves and self.algorithm.traits.replayable

    def _copies(self, members: Sequence[int], gradients: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(members, gradients, strict=True)
        return [torch.empty_like(self.parameters[index]).copy_(gradient) for index, gradient in pairs]

    @property
    def _early_speaks(self) -> bool:
        """Whether the ranks have to hear which buckets left too early; where nothing has left they know of no round."""
        return self._early is not None and self._early.speaks and self._queue.has_sent

    def _all_have_left(self) -> None:
        """Behind the last bucket: tell the other ranks what was used here, if there will be no more to say.

        Not at the end of the backward, which several modules may reach in another order on each rank.
        """
        if self._optional is not None and self._optional.speaks and not self._early_speaks:
            self._queue.drain()
            self._message.send([self._optional.message()])

    def _finish_round(self) -> None:
        """Every bucket has left: hear what the other ranks have to say, wait for the buckets and hand them over."""
        early = self._early if self._early_speaks else None
        optional = self._optional if self._optional is not None and self._optional.speaks else None
        if early is not None or optional is not None:
            self._hear_the_others(optional, early)
        untouched = frozenset() if self._optional is None else self._optional.used_by_nobody
        self._queue.finish(untouched)
        if not self._queue.sends:
            self._undefined.fill_with_zeros(untouched)
        self._reset()

    def _enter_backward(self, arriving: tuple[int, ...]) -> None:
        """A backward has brought something; the first time in each, get ready for the rest.

        Args:
            arriving: The parameters whose gradients are there.
        """
        before = self._lifecycle.phase.state
        if before is not State.REDUCING:
            # First of all: an exception from now on, Ctrl-C in the middle of the agreement even, must not pass unseen.
            if self._lifecycle.on(Event.GRADIENT) is State.FAILED:
                raise refusals.out_of_step(self.rank)
            self._watch_where_others_have_hooks()
        if before is State.ARMED:
            self._progress.backward_begins(self._lifecycle.phase.after_forward)
        if not self.buckets:
            self._seal_plan()
        begins = self._call_back_at_the_end(self.finalize_backward)
        if begins and self._optional is None and not self._bucket_set.notes_arrivals and not self._is_learning:
            for bucket in self._queue.still_here:
                self._hooks.gather(bucket.members, bucket.missing, arriving)
        if self._optional is not None and (absent := self._optional.absent_from_the_start(arriving)):
            self._completion.do_without(absent)

    @property
    def _is_learning(self) -> bool:
        """Whether each gradient is looked at, to learn which buckets may leave inside a compiled backward."""
        return self._early is not None and self._early.is_learning and self._queue.sends

    def _outputs_are_reached(self) -> None:
        """The first round of a static graph ends with this pass, even if all gradients come in passes inside it."""
        self._call_back_at_the_end(self.finalize_backward)

    def _call_back_at_the_end(self, callback: Callable[[], None]) -> bool:
        task = torch_internals.current_graph_task_id()
        if task in self._tasks_with_callback:
            return False
        # The callback belongs to the innermost pass, so each pass that brings gradients queues one.
        self._tasks_with_callback.add(task)
        torch_internals.queue_backward_callback(callback)
        return True

    def _finalize_backward_without_plan(self) -> None:
        """End a backward that came before any call of the module.

        Either somebody calls ``module.forward`` or a method of their own: all gradients are there, and are reduced. Or
        it was a regulariser: its gradients stay where they are, and are reduced together with those of the first round.
        """
        if torch_internals.is_inside_backward():
            return
        self._tasks_with_callback.clear()
        arrived, self._arrived_before_plan = self._arrived_before_plan, set()
        if self._lifecycle.phase.state is State.LOCAL:  # a hook has called the module inside no_sync
            return
        if len(arrived) == len(self.parameters):
            if self._lifecycle.on(Event.GRADIENT) is State.FAILED:
                raise refusals.out_of_step(self.rank)
            self._progress.backward_begins(after_forward=False)
            self._seal_plan()
            if self._optional is not None:
                for index in arrived:
                    self._optional.settles(index, has_left=False, is_undefined=self.parameters[index].grad is None)
            for bucket in self.buckets:
                self._completion.complete(bucket)
            self.finalize_backward()
            return
        self._num_backwards_alone += 1
        if self._num_backwards_alone == refusals.MOST_BACKWARDS_ALONE:
            log.warning(refusals.backwards_alone(self.rank, len(arrived), len(self.parameters)))

    def _seal_plan(self) -> None:
        self.settings.on_plan_sealed(self._bucket_set.seal(self.algorithm.name))

    def _refuse_missing_gradients(self) -> NoReturn:
        indices = [index for bucket in self.buckets for index in sorted(bucket.missing)]
        missing = [self._fqn(index) for index in indices]
        frozen = [self._fqn(index) for index in indices if not self.parameters[index].requires_grad]
        try:
            self._queue.wait()
        finally:
            self._reset()
        raise refusals.missing_gradients(self.rank, missing, frozen, len(self.parameters), self.settings.static_graph)

    def _reset(self) -> None:
        self._progress.round_ends(self._queue.has_sent)
        if self._early is not None:
            self._early.begin_round(self._queue.has_sent)
        self._queue.reset()
        self._hooks.tell_of_each()
        self._with_running_hooks.clear()
        self._tasks_with_callback.clear()
        if self._optional is not None:
            self._optional.begin_round()
        self._undefined.begin_round()
        self._lifecycle.on(Event.ROUND_ENDS)  # last: a round that Ctrl-C leaves half reset is not begun anew

    def _hear_the_others(self, optional: OptionalGradients | None, early: EarlyBuckets | None) -> None:
        """Tell the other ranks in one message what each of these has to say, and let it hear what they said."""
        if not self._message.is_under_way:
            parts = [] if optional is None else [optional.message()]
            if early is not None:
                parts.append(early.message(self.buckets, repeatable=self.algorithm.traits.replayable))
            self._queue.drain()
            self._message.send(parts)
        if early is not None:
            self._queue.wait()  # before anything is sent again
        try:
            heard = self._message.wait()
        except RuntimeError as error:
            failure = refusals.all_reduce_failed(self.rank, "what the ranks tell each other behind the buckets", error)
            raise self._progress.report_failure(failure) from error
        if optional is not None:
            optional.hear(heard[0])
        if early is not None:
            self._send_again(early, early.verdict(self.buckets, heard[-1]))

    def _send_again(self, early: EarlyBuckets, verdict: Verdict) -> None:
        """Send buckets that left too early once more."""
        names = [self._fqn(index) for index in verdict.late]
        if not verdict.repeatable:
            self._reset()
            raise refusals.contributor_after_launch(
                self.rank, names, None if self.algorithm.traits.replayable else self.algorithm.name, early.has_moved
            )
        for bucket in verdict.buckets:
            log.warning(
                "rank %d: %s left inside the backward before all was there, is sent again, and will not leave early"
                " any more: on some rank %s got more than one gradient",
                self.rank,
                bucket.describe(),
                ", ".join(names),
            )
            self._queue.send_again(bucket, early.own_gradients(bucket))
        self._queue.wait()
        early.put_back()

    def _fqn(self, index: int) -> str:
        return self.builder.gradients[index].fqn
