"""Launching a bucket inside a compiled backward, before AccumulateGrad has seen its gradients.

Note [Launched before AccumulateGrad]
A compiled backward cannot tell whether another contribution to a gradient will follow: from a regulariser, a second
forward, or a layer that is used twice. So some iterations teach: the first one and, since graphs are compiled later
too, every agreement point. There the reducer watches each bucket that may not be launched early yet. A bucket has one
contributor if one graph computed it once, and each ``.grad`` then was the very tensor that was computed. The ranks
agree on these buckets, and from then on launch them as soon as a graph has computed them. A bucket that turned out to
be launched too early is never launched early again.

The reducer keeps a detached alias of each computed gradient until the iteration ends. The engine adds a second
contribution *in place* if nothing else holds the gradient's memory. Because of the alias it makes a new tensor, which
the reducer notices. It also notices a hook that writes into the gradient, by the version, and a second arrival.

If another contribution does follow, the bucket was launched too early. In each iteration, after the last bucket, the
ranks tell each other which parameters got one. Every rank still has its own gradients: in ``.grad``, which does not
point at the flat buffer before the iteration ends, or as copies if hooks launched the bucket. So every rank launches
these buckets again, with complete gradients, and from then on their hooks launch them. The result is exact. If the
algorithm is not replayable (comm hooks are not), every rank raises. Every rank also raises if gradients move: with
``static_graph`` a backward may return views of the flat buffer, and then the launch overwrites this rank's gradients.

Note [Observed gradients]
A backward may contain collectives of its own in the same process group, a synchronized BatchNorm's for example. They
pair up only if all ranks launch their buckets at the same places among them. So a fact that only one rank knows must
not delay a bucket, such as a user's hook on a parameter there. That rank launches the bucket as the others do, but
leaves ``.grad`` alone and does not move the gradients, since the hook looks at them. It launches the bucket again
whatever the hook did. This happens once, since from then on every rank leaves the bucket to its hooks. It is impossible
with a comm hook, and with ``static_graph`` if the gradients move on another rank. Then a bucket with something in
``.grad`` to be added to waits, on that rank alone, and a hook that has changed a gradient is an error. Values are
compared for that, since a write through ``gradient.data`` changes no version.

Note [Hooks that cannot be seen]
The reducer sees hooks on a parameter, but not those on its AccumulateGrad node. A hook before the node may write
through ``gradient.data``. So values are compared in iterations that teach, and in the first iteration after anyone has
registered a hook of any kind. Later writes by such a hook go unnoticed. The device compares the values as they arrive,
and the host reads all results at once, just before the ranks exchange theirs.
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
        is_enabled: Whether compiled backwards hand buckets over. Otherwise nothing is learnt and no bucket is early.
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
        self.is_enabled = is_enabled
        self._has_learned = False
        self._has_moved = False  # whether a backward has ever returned other tensors than its gradients
        self._ignored: set[tuple[int, ...]] = set()
        self._num_hooks_of_others = torch_internals.num_hooks_of_others()

    @property
    def is_learning(self) -> bool:
        """Whether buckets are watched in this iteration; the same on every rank."""
        return self.is_enabled and (not self._has_learned or is_agreement_point(self._set.iteration.number))

    @property
    def has_message(self) -> bool:
        """Whether the ranks tell each other which buckets were too early; the same on every rank."""
        if not self.is_enabled or not self._set.iteration.has_launched:
            return False
        return self.is_learning or any(bucket.may_launch_early for bucket in self._set.buckets)

    def ignore(self, buckets: Sequence[tuple[int, ...]]) -> None:
        """Leave these buckets to their hooks; see `Reducer.ignore_computed_buckets`."""
        self._ignored.update(buckets)

    # A compiled backward computes a bucket.

    def decide(self, param_indices: tuple[int, ...], moves: bool) -> EarlyDecision:
        """A compiled backward has computed all gradients of a bucket.

        Args:
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
            decision: What `decide` returned, and not that it waits.
            moved: What the backward has computed, if it returns other tensors; gone after the launch.
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
    """Whether a hook could notice that ``.grad`` is taken away for a while, or it could not be given back."""
    if torch_internals.has_gradient_hooks(parameter):
        return True
    return parameter.grad is not None and parameter.grad.layout is not torch.strided
