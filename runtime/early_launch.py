"""Launching a bucket inside a compiled backward, before AccumulateGrad has seen its gradients.

Note [Launched before AccumulateGrad]
Inside a compiled backward nobody knows whether another contribution to a gradient is still to come: from a
regulariser, a second forward, a layer used twice. So some iterations teach: the first one and, as graphs are compiled
later too, every agreement point (`agreement_points`). A bucket that may not be launched early yet is watched there, and
has one contributor if one graph computed it once and each ``.grad`` then was the very tensor that was computed. The
ranks agree on those buckets, and from then on they are launched when a graph has computed them; one that was found late
never is again.

What was computed is kept as a detached alias until the iteration ends. The engine adds a second contribution *in place*
into a gradient whose memory nobody else holds; with the alias it makes a new tensor, which shows. A hook that writes
into the gradient changes its version. A second arrival shows by itself.

If another contribution comes after all, the bucket was launched too early. In each iteration the ranks tell each other,
behind the last bucket, to which parameters that happened. Every rank still has its own gradients: in ``.grad``, which
only the end of an iteration points at the flat buffer, or kept aside where the bucket was launched by its hooks. So
every rank launches those buckets again, with what is complete now, and launches them by their hooks from then on. The
result is exact. Where the algorithm is not replayable, as comm hooks, every rank raises. So it does where gradients
move: with ``static_graph`` a backward may return views of the flat buffer, and this rank's own gradients are gone when
their bucket has been launched.

Note [Launched in sight]
A backward may have collectives of its own, a synchronised BatchNorm's for example, in the same process group. They meet
their counterparts only if all ranks launch their buckets at the same places among them. So what one rank alone knows
must not hold a bucket back: that somebody has put a hook on a parameter there, for example. Such a bucket is launched
as the others are, but its ``.grad`` is not taken away, and its gradients do not move, since somebody looks at them. It
is launched again whatever the hooks did, which happens once, as it waits for its hooks from then on, on every rank.
With a comm hook that cannot be done, nor with ``static_graph`` where nobody looks on some rank. Then a bucket in whose
``.grad`` there is something to be added to waits on that rank alone, and it is an error if the hooks have changed a
gradient. Its values tell, since what is written through ``gradient.data`` shows in no version.

Note [Hooks that nobody sees]
Hooks on a parameter can be seen, those on its AccumulateGrad node cannot. A hook before the node may write through
``gradient.data``, so values are compared in iterations that teach, and in the first iteration after somebody has
registered a hook, of whatever kind. What such a hook does later than that goes unnoticed. The device compares them as
they arrive; the host reads all results at once, just before the ranks exchange theirs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.runtime.arrivals.accumulators import Accumulators
from ddp_compile.runtime.arrivals.parameter_hooks import ParameterHooks
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.buckets.computed_bucket import ComputedBucket, EarlyDecision
from ddp_compile.runtime.desync.model_order import is_agreement_point
from ddp_compile.runtime.launch_queue import LaunchQueue

log = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """What the ranks have found about one iteration; the same on every rank.

    Args:
        late: Parameters that on some rank got another contribution after their bucket had been launched.
        buckets: Their buckets, in launch order.
        can_be_replayed: Whether every rank can launch those buckets again.
    """

    late: list[int]
    buckets: list[Bucket]
    can_be_replayed: bool


class NoEarlyLaunch:
    """Every bucket is launched by its parameters' hooks."""

    is_learning = False  #: whether buckets are watched in this iteration, on every rank
    has_message = False  #: whether the ranks need to hear of each other at this iteration's end; the same on every rank
    has_moved = False  #: whether a backward has ever returned other tensors than its gradients

    def ignore(self, buckets: Sequence[tuple[int, ...]]) -> None:
        """Graphs that compute these buckets run for other parameters as well, and name those gradients as these."""

    def decide(self, param_indices: tuple[int, ...], can_be_replayed: bool) -> EarlyDecision:
        """A compiled backward has computed all gradients of a bucket; see `EarlyLaunch.decide`."""
        return EarlyDecision.WAIT

    def follow(
        self,
        bucket: Bucket,
        decision: EarlyDecision,
        gradients: Sequence[Tensor],
        moved: Sequence[Tensor] | None = None,
        can_be_replayed: bool = True,
    ) -> None:
        """Watch what becomes of the gradients of a computed bucket, and launch it unless it is only watched.

        Args:
            bucket: The bucket.
            decision: What `decide` returned; not that it waits.
            gradients: What the backward will return for them.
            moved: Its own gradients where those are other tensors; then they cannot be launched again.
            can_be_replayed: As `decide` was told.
        """
        raise NotImplementedError("nothing is decided to be followed")

    def arrived(self, index: int) -> bool:
        """AccumulateGrad has stored a gradient; returns whether its bucket was launched before that."""
        return False

    def hand_over_for_now(self) -> None:
        """A backward has ended and another one may bring the rest: what was launched must be averaged all the same."""

    def message(self, can_be_replayed: bool) -> bytearray:
        """When the last bucket has been launched: what the other ranks have to hear; `verdict` reads it."""
        return bytearray()

    def verdict(self, said: Sequence[int]) -> Verdict:
        """What has to be done about this iteration."""
        return Verdict([], [], True)

    def put_back(self) -> None:
        """Let ``.grad`` be the tensors that they were before the iteration, for the result to be copied into."""

    def begin_iteration(self, has_launched: bool) -> None:
        """Forget what belongs to the iteration that has ended.

        Args:
            has_launched: Whether anything was launched in it: otherwise the other ranks know nothing of it.
        """


class EarlyLaunch(NoEarlyLaunch):
    """Learns which buckets may be launched early, watches them, and finds those that were launched too early.

    Args:
        bucket_set: The buckets; ``may_launch_early`` and ``was_launched_too_early`` of each are set here alone.
        queue: Launches them.
        hooks: Tell of what AccumulateGrad stores.
        accumulators: Of the parameters.
        rank: This rank, for the log.
    """

    def __init__(
        self,
        bucket_set: BucketSet,
        queue: LaunchQueue,
        hooks: ParameterHooks,
        accumulators: Accumulators,
        rank: int,
    ) -> None:
        self._set = bucket_set
        self._queue = queue
        self._hooks = hooks
        self._parameters = bucket_set.parameters
        self._rank = rank
        self._accumulators = accumulators
        self._iteration_number = 1  # the same on every rank
        self._has_learnt = False
        self._ignored: set[tuple[int, ...]] = set()
        self._num_hooks_of_others = torch_internals.num_hooks_of_others()
        self._has_new_hooks = False  # in this iteration

    def ignore(self, buckets: Sequence[tuple[int, ...]]) -> None:
        self._ignored.update(buckets)

    def decide(self, param_indices: tuple[int, ...], can_be_replayed: bool) -> EarlyDecision:
        """A compiled backward has computed all gradients of a bucket.

        Args:
            param_indices: The bucket's parameters.
            can_be_replayed: Whether the bucket could be launched twice.

        Returns:
            What becomes of it. Unless it waits, `follow` is to be called.
        """
        num_hooks = torch_internals.num_hooks_of_others()
        if num_hooks != self._num_hooks_of_others:
            self._num_hooks_of_others, self._has_new_hooks = num_hooks, True
        bucket = self._set.of_param_indices.get(param_indices)
        if param_indices in self._ignored or (bucket is None and self._set.buckets):  # of another plan
            return EarlyDecision.WAIT
        is_allowed = bucket is not None and bucket.may_launch_early
        is_barred = bucket is not None and (bucket.was_launched_too_early or bucket.iteration.computed is not None)
        if is_barred or not (is_allowed or self.is_learning):
            return EarlyDecision.WAIT
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # there, changes show in no version
            return EarlyDecision.WAIT
        if not self._accumulators.are_going_to_run(param_indices):
            return EarlyDecision.WAIT
        if any(_is_looked_at(self._parameters[index]) for index in param_indices):
            may_launch = can_be_replayed or all(self._parameters[index].grad is None for index in param_indices)
            return EarlyDecision.LAUNCH_IN_SIGHT if is_allowed and may_launch else EarlyDecision.WAIT
        return EarlyDecision.LAUNCH if is_allowed else EarlyDecision.WATCH

    def follow(
        self,
        bucket: Bucket,
        decision: EarlyDecision,
        gradients: Sequence[Tensor],
        moved: Sequence[Tensor] | None = None,
        can_be_replayed: bool = True,
    ) -> None:
        if decision is not EarlyDecision.WATCH:
            bucket.claim(bucket.gradients())  # while ``.grad`` says which views are gradients
        self.has_moved = self.has_moved or moved is not None
        compares_values = moved is None and (decision is not EarlyDecision.LAUNCH or self._has_new_hooks)
        bucket.iteration.computed = computed = ComputedBucket(bucket, gradients, decision, compares_values, moved)
        if decision is EarlyDecision.WATCH:
            return
        if decision is EarlyDecision.LAUNCH_IN_SIGHT and can_be_replayed:
            computed.expect_another_launch()
        self._queue.complete_with(bucket, computed.contributions())
        if moved is not None:
            bucket.release_flattened()
        computed.watch()  # gradients that move lie in the buffer, which has been written
        self._hooks.batch(bucket, notify_of_last=False)

    def arrived(self, index: int) -> bool:
        if not self._set.of_parameter:
            return False
        computed = self._set.of_parameter[index].iteration.computed
        if computed is None:
            return False
        computed.arrive(index)
        return computed.is_launched

    def hand_over_for_now(self) -> None:
        self._compare()
        for bucket in self._set.buckets:
            computed = bucket.iteration.computed
            if computed is None or not computed.is_launched or bucket.iteration.own is not None:
                continue
            if computed.holds_its_own:
                bucket.iteration.own = [own.clone() for own in computed.own_gradients()]
            else:
                computed.is_lost = True
            bucket.point_gradients_at_views()
            bucket.hand_over()

    @property
    def is_learning(self) -> bool:  # type: ignore[override]
        return not self._has_learnt or is_agreement_point(self._iteration_number)

    @property
    def has_message(self) -> bool:  # type: ignore[override]
        return self.is_learning or any(bucket.may_launch_early for bucket in self._set.buckets)

    def message(self, can_be_replayed: bool) -> bytearray:
        """When the last bucket has been launched: which was too early, and which may be so. `verdict` reads it.

        Args:
            can_be_replayed: Whether a bucket may be launched twice in an iteration at all.

        Returns:
            A flag for each parameter that got another contribution after its bucket had been launched; one for each
            bucket that cannot be launched again; one for each that does not have one contributor.
        """
        is_shadow = self._queue.is_shadow  # which has nothing to say
        self._compare()
        late, cannot, has_more = bytearray(len(self._parameters)), bytearray(), bytearray()
        for bucket in self._set.buckets:
            computed = bucket.iteration.computed
            if computed is not None and computed.is_launched:
                for index in computed.late:
                    late[index] = 1
            holds_its_own = is_shadow or _holds_its_own(bucket)
            cannot.append(bucket.may_launch_early and not (can_be_replayed and holds_its_own))
            has_one = is_shadow or (computed is not None and computed.has_one_contributor)
            has_more.append(self.is_learning and not has_one)
        return late + cannot + has_more

    def _compare(self) -> None:
        """Compare all gradients with those that were computed; reads from each device at most once."""
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

    def verdict(self, said: Sequence[int]) -> Verdict:
        """What has to be done about this iteration.

        Args:
            said: The flags of `message` over all ranks: 1 where any rank has said so.
        """
        buckets = self._set.buckets
        late = [index for index in range(len(self._parameters)) if said[index]]
        cannot, has_more = said[len(self._parameters) : -len(buckets)], said[-len(buckets) :]
        if self.is_learning:
            self._learn([bucket for bucket, more in zip(buckets, has_more, strict=True) if not more])
        affected = [bucket for bucket in buckets if not set(late).isdisjoint(bucket.param_indices)]
        for bucket in affected:
            bucket.was_launched_too_early, bucket.may_launch_early = True, False
        return Verdict(late, affected, not any(cannot[bucket.spec.index] for bucket in affected))

    def _learn(self, agreed: Sequence[Bucket]) -> None:
        """Launch buckets early from now on that had one contributor on every rank."""
        for bucket in agreed:
            bucket.may_launch_early = True
        if agreed or not self._has_learnt:
            log.info(
                "rank %d: %d of %d buckets may be launched inside the compiled backward, %d of them since iteration %d",
                self._rank,
                sum(bucket.may_launch_early for bucket in self._set.buckets),
                len(self._set.buckets),
                len(agreed),
                self._iteration_number,
            )
        self._has_learnt = True

    def put_back(self) -> None:
        for bucket in self._set.buckets:
            if bucket.iteration.computed is not None:
                bucket.iteration.computed.put_back()

    def begin_iteration(self, has_launched: bool) -> None:
        self._iteration_number += has_launched
        self._has_new_hooks = False


def own_gradients(bucket: Bucket) -> list[Tensor]:
    """This rank's gradients of a bucket that has been launched in this iteration, complete now."""
    if bucket.iteration.own is not None:
        return bucket.iteration.own
    assert bucket.iteration.computed is not None
    return bucket.iteration.computed.own_gradients()


def _holds_its_own(bucket: Bucket) -> bool:
    """Whether `own_gradients` are at hand."""
    computed = bucket.iteration.computed
    if computed is not None and computed.is_lost:
        return False
    return bucket.iteration.own is not None or (computed is not None and computed.holds_its_own)


def _is_looked_at(parameter: Parameter) -> bool:
    """Whether taking ``.grad`` away for a while could be noticed, or cannot be made good."""
    if torch_internals.has_gradient_hooks(parameter):
        return True
    return parameter.grad is not None and parameter.grad.layout is not torch.strided
