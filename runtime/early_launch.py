"""Launching a bucket inside a compiled backward, before AccumulateGrad has seen its gradients.

Note [Launched before AccumulateGrad]
Inside a compiled backward there is no way to know whether another contribution to a gradient will come: from a
regularizer, a second forward, or a layer used twice. So the reducer learns in some iterations: in the first one and,
since graphs may be compiled later, at every agreement point (`agreement_points`). There, it watches each bucket that
may not be launched early yet. A bucket has one contributor if one graph computed it once and each ``.grad`` then was
the computed tensor itself. The ranks agree on these buckets, and launch them from then on as soon as a graph has
computed them. A bucket that turned out to be launched too early is never launched early again.

A detached alias of each computed gradient is kept until the iteration ends. The engine adds a second contribution *in
place* to a gradient whose memory nothing else holds; with the alias it makes a new tensor, which can be seen. A hook
that writes to the gradient changes its version. A second arrival is counted.

If another contribution still comes, the bucket was launched too early. In each iteration, after the last bucket, the
ranks exchange for which parameters that happened. Every rank still has its own gradients: in ``.grad``, which becomes a
view of the flat buffer only at the end of an iteration, or as copies if hooks launched the bucket. So every rank
launches those buckets again with the complete gradients, and from then on their hooks launch them. The result is exact.
If the algorithm is not replayable, which includes comm hooks, every rank raises instead. Every rank also raises if
gradients move: with ``static_graph`` a backward may return views of the flat buffer, and then this rank's own gradients
are gone after the launch.

Note [Observed gradients]
A backward may have its own collectives in the same process group, those of a synchronized BatchNorm for example. They
are paired correctly only if all ranks launch their buckets at the same places among them. So a bucket must not be held
back for a reason that only one rank knows, such as a user's hook on a parameter. Such a bucket is launched like the
others, but its ``.grad`` is not removed and its gradients do not move, since the hook reads them. It is launched again
whatever the hook did. That happens once, since from then on its hooks launch it, on every rank. With a comm hook a
second launch is impossible; with ``static_graph`` it is impossible if the gradients move on another rank. In these
cases, a bucket whose ``.grad`` already holds something waits on that rank alone, and a hook that changes a gradient is
an error. Values are compared to find that, since a write through ``gradient.data`` changes no version.

Note [Hooks that nobody sees]
Hooks on a parameter can be seen, but not those on its AccumulateGrad node. A hook before the node may write through
``gradient.data``. So values are compared in iterations that learn, and in the first iteration after any hook was
registered. A write that such a hook makes later goes unnoticed. The device compares the values as they arrive. The host
reads all results at once, just before the ranks exchange theirs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.errors import this_rank
from ddp_compile.runtime.arrivals.accumulators import Accumulators
from ddp_compile.runtime.arrivals.parameter_hooks import ParameterHooks
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.buckets.computed_bucket import ComputedBucket, EarlyDecision
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.desync.model_order import is_agreement_point
from ddp_compile.runtime.launch_queue import LaunchQueue

log = logging.getLogger(__name__)


class EarlyLaunch:
    """Learns which buckets may be launched early, watches them, and repeats launches that were too early.

    Args:
        bucket_set: The buckets and their iteration.
        queue: Launches them.
        hooks: Report what AccumulateGrad stores.
        accumulators: The AccumulateGrad nodes of the parameters.
        is_enabled: Whether compiled backwards hand over buckets. Otherwise nothing is learned and no bucket is early.
    """

    def __init__(
        self,
        bucket_set: BucketSet,
        queue: LaunchQueue,
        hooks: ParameterHooks,
        accumulators: Accumulators,
        is_enabled: bool,
    ) -> None:
        self._set = bucket_set
        self._queue = queue
        self._hooks = hooks
        self._accumulators = accumulators
        self._is_enabled = is_enabled
        self._has_learned = False
        self._has_moved = False  # whether a backward has ever returned other tensors than its gradients
        self._ignored: set[tuple[int, ...]] = set()
        self._num_hooks_of_others = torch_internals.num_hooks_of_others()

    @property
    def is_learning(self) -> bool:
        """Whether buckets are watched in this iteration; the same on every rank."""
        return self._is_enabled and (not self._has_learned or is_agreement_point(self._set.iteration.number))

    @property
    def has_message(self) -> bool:
        """Whether the ranks exchange which buckets were too early; the same on every rank."""
        if not self._is_enabled or not self._set.iteration.has_launched:
            return False
        return self.is_learning or any(bucket.may_launch_early for bucket in self._set.buckets)

    def ignore(self, buckets: Sequence[tuple[int, ...]]) -> None:
        """Leave these buckets to their hooks; see `Reducer.ignore_computed_buckets`."""
        self._ignored.update(buckets)

    # A compiled backward computes a bucket.

    def decide(self, param_indices: tuple[int, ...], moves: bool) -> EarlyDecision:
        """A compiled backward has computed all gradients of a bucket.

        Args:
            param_indices: The bucket's parameters.
            moves: Whether the backward can return other tensors than it has computed.

        Returns:
            What happens to the bucket. Call `follow` unless it waits.
        """
        num_hooks = torch_internals.num_hooks_of_others()
        if num_hooks != self._num_hooks_of_others:
            self._num_hooks_of_others, self._set.iteration.has_new_hooks = num_hooks, True
        bucket = self._set.of_param_indices.get(param_indices)
        if param_indices in self._ignored or (bucket is None and self._set.buckets):  # of another plan
            return EarlyDecision.WAIT
        is_allowed = bucket is not None and bucket.may_launch_early
        is_barred = bucket is not None and (bucket.was_launched_too_early or bucket.iteration.computed is not None)
        if is_barred or not (is_allowed or self.is_learning):
            return EarlyDecision.WAIT
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # there, changes do not change versions
            return EarlyDecision.WAIT
        if not self._accumulators.are_going_to_run(param_indices):
            return EarlyDecision.WAIT
        parameters = [self._set.parameters[index] for index in param_indices]
        if any(map(_is_observed, parameters)):
            may_launch = self._can_launch_twice(moves) or all(parameter.grad is None for parameter in parameters)
            return EarlyDecision.LAUNCH_OBSERVED if is_allowed and may_launch else EarlyDecision.WAIT
        return EarlyDecision.LAUNCH if is_allowed else EarlyDecision.WATCH

    def _can_launch_twice(self, moves: bool) -> bool:
        return not moves and self._queue.algorithm.traits.replayable

    def follow(
        self,
        bucket: Bucket,
        decision: EarlyDecision,
        gradients: Sequence[Tensor],
        moves: bool,
        moved: Sequence[Tensor] | None = None,
    ) -> None:
        """Watch what becomes of the gradients that a backward returns for a bucket, and launch it if so decided.

        Args:
            bucket: The bucket.
            decision: What `decide` returned, unless that is to wait.
            gradients: What the backward returns.
            moves: As for `decide`.
            moved: The computed tensors, if the backward returns other ones. They are gone after the launch.
        """
        if decision is not EarlyDecision.WATCH:
            bucket.claim(bucket.gradients())  # while ``.grad`` still shows which views are gradients
        has_new_hooks = self._set.iteration.has_new_hooks
        compares_values = moved is None and (decision is not EarlyDecision.LAUNCH or has_new_hooks)
        computed = ComputedBucket(bucket, gradients, decision, compares_values, moved)
        bucket.mark_computed(computed)
        if decision is EarlyDecision.WATCH:
            return
        if decision is EarlyDecision.LAUNCH_OBSERVED and self._can_launch_twice(moves):
            computed.expect_another_launch()
        self._queue.complete_with(bucket, computed.contributions())
        if moved is not None:
            self._has_moved = True
            bucket.release_flattened()
        computed.watch()  # after the launch, which may write them: it fills views, and scales a sparse gradient
        self._hooks.batch(bucket, notify_of_last=False)

    # AccumulateGrad stores its gradients.

    def arrived(self, index: int) -> bool:
        """AccumulateGrad has stored a gradient; returns whether its bucket was launched before that."""
        if not self._set.of_parameter:
            return False
        computed = self._set.of_parameter[index].iteration.computed
        if computed is None:
            return False
        computed.arrive(index)
        return computed.is_launched

    def hand_over_incomplete(self) -> None:
        """A backward has ended, and another one may bring the missing gradients: hand over the launched buckets."""
        self._compare()
        for bucket in self._set.buckets:
            computed = bucket.iteration.computed
            if computed is None or not computed.is_launched or bucket.iteration.own is not None:
                continue
            if computed.holds_its_own:
                bucket.keep_own([own.clone() for own in computed.own_gradients()])
            else:
                computed.is_lost = True
            bucket.point_gradients_at_views()
            bucket.hand_over()

    # The iteration ends.

    def message(self) -> bytearray:
        """After the last launch, this rank's message to the others. `finish` takes the messages of all ranks.

        Returns:
            A flag for each parameter that got another contribution after its bucket had been launched; one for each
            bucket that cannot be launched again; one for each that does not have one contributor.
        """
        is_shadow = self._set.iteration.is_shadow  # a shadow has nothing to say
        replayable = self._queue.algorithm.traits.replayable
        self._compare()
        late, cannot, has_more = bytearray(len(self._set.parameters)), bytearray(), bytearray()
        for bucket in self._set.buckets:
            computed = bucket.iteration.computed
            if computed is not None and computed.is_launched:
                for index in computed.late:
                    late[index] = 1
            holds_its_own = is_shadow or _holds_its_own(bucket)
            cannot.append(bucket.may_launch_early and not (replayable and holds_its_own))
            has_one = is_shadow or (computed is not None and computed.has_one_contributor)
            has_more.append(self.is_learning and not has_one)
        return late + cannot + has_more

    def finish(self, said: Sequence[int]) -> None:
        """Learn from this iteration, and repeat launches that were too early.

        Args:
            said: The flags of `message` over all ranks: 1 if any rank has set it.

        Raises:
            GradientArrivalError: On every rank, if a bucket cannot be launched again.
            ReductionError: A reduction failed or timed out.
        """
        buckets, num_parameters = self._set.buckets, len(self._set.parameters)
        late = [index for index in range(num_parameters) if said[index]]
        cannot, has_more = said[num_parameters : -len(buckets)], said[-len(buckets) :]
        if self.is_learning:
            self._learn([bucket for bucket, more in zip(buckets, has_more, strict=True) if not more])
        too_early = [bucket for bucket in buckets if not set(late).isdisjoint(bucket.param_indices)]
        for bucket in too_early:
            bucket.forbid_early_launch()
        names = [self._set.names[index] for index in late]
        if any(cannot[bucket.spec.index] for bucket in too_early):
            algorithm = self._queue.algorithm
            name = None if algorithm.traits.replayable else algorithm.name
            raise error_messages.contributor_after_launch(names, name, self._has_moved)
        for bucket in too_early:
            log.warning(
                "%s: %s was launched inside the backward before all its gradients were there, because on some rank %s"
                " got more than one gradient. It is launched again, and will no longer be launched early",
                this_rank(),
                bucket.describe(),
                ", ".join(names),
            )
            self._queue.launch_again(bucket, [] if self._set.iteration.is_shadow else _own_gradients(bucket))
        self._queue.wait()
        for bucket in self._set.buckets:
            if bucket.iteration.computed is not None:
                bucket.iteration.computed.restore_gradients()

    def _compare(self) -> None:
        """Compare all gradients with those that were computed; the host waits for each device at most once."""
        unread: dict[torch.device, list[tuple[ComputedBucket, list[Tensor]]]] = {}
        for bucket in self._set.buckets:
            computed = bucket.iteration.computed
            if computed is not None and (comparisons := computed.compare()):
                unread.setdefault(comparisons[0].device, []).append((computed, comparisons))
        for of_device in unread.values():
            flat = torch.stack([each for _, comparisons in of_device for each in comparisons])
            are_equal = iter(flat.tolist())
            for computed, comparisons in of_device:
                computed.read(itertools.islice(are_equal, len(comparisons)))

    def _learn(self, agreed: Sequence[Bucket]) -> None:
        """From now on, launch these buckets early, since they had one contributor on every rank."""
        for bucket in agreed:
            bucket.allow_early_launch()
        if agreed or not self._has_learned:
            log.info(
                "%s: %d of %d buckets may be launched inside the compiled backward, %d of them since iteration %d",
                this_rank(),
                sum(bucket.may_launch_early for bucket in self._set.buckets),
                len(self._set.buckets),
                len(agreed),
                self._set.iteration.number,
            )
        self._has_learned = True


def _own_gradients(bucket: Bucket) -> list[Tensor]:
    """This rank's complete gradients of a bucket that has been launched in this iteration."""
    if bucket.iteration.own is not None:
        return bucket.iteration.own
    assert bucket.iteration.computed is not None
    return bucket.iteration.computed.own_gradients()


def _holds_its_own(bucket: Bucket) -> bool:
    """Whether this rank still has `_own_gradients`."""
    computed = bucket.iteration.computed
    if computed is not None and computed.is_lost:
        return False
    return bucket.iteration.own is not None or (computed is not None and computed.holds_its_own)


def _is_observed(parameter: Parameter) -> bool:
    """Whether the temporary removal of ``.grad`` could be noticed, or could not be undone."""
    if torch_internals.has_gradient_hooks(parameter):
        return True
    return parameter.grad is not None and parameter.grad.layout is not torch.strided
