"""Launching a bucket inside a compiled backward, before AccumulateGrad has seen its gradients.

Note [Launched before AccumulateGrad]
A compiled backward cannot tell whether another contribution to a gradient will follow: from a regularizer, a second
forward, or a layer that is used twice. The reducer launches the bucket anyway, from the first iteration on, and finds
out afterward. It keeps a detached alias of each computed gradient until the iteration ends. The engine adds a second
contribution *in place* if nothing else holds the gradient's memory. Because of the alias it makes a new tensor, which
the reducer notices. It also notices a hook that writes into the gradient, by the version, and a second arrival.

If another contribution does follow, the bucket was launched too early. In each iteration, after the last bucket, the
ranks tell each other which parameters got one. Every rank still has its own gradients: in ``.grad``, which does not
point at the flat buffer before the iteration ends, or as copies if hooks launched the bucket. So every rank launches
these buckets again, with complete gradients, and from then on their hooks launch them. The result is exact. Only
algorithms that are replayable launch early; the hooks of AccumulateGrad launch the buckets of the others.

Every rank raises if a gradient that has to be launched again is gone. With ``static_graph`` a backward may return views
of the flat buffer, and then the launch overwrites this rank's gradients. It does so only after the bucket was launched
early once and nothing followed, since later iterations are the same.

Keeping the gradients of a bucket and the message after the last bucket have a price, which modules that compile no such
backward do not pay. So the ranks agree on the buckets that may be launched early. When the plan is sealed, these are
all of them if any rank has compiled a graph that hands buckets over, and otherwise none. After the first iteration they
are those that a compiled backward of some rank has computed. At later agreement points others join, of graphs that were
compiled later.

Note [Observed gradients]
A backward may contain collectives of its own in the same process group, a synchronized BatchNorm's for example. They
pair up only if all ranks launch their buckets at the same places among them. So a fact that only one rank knows must
not delay a bucket, such as a user's hook on a parameter there. That rank launches the bucket as the others do, but
leaves ``.grad`` alone and does not move the gradients, since the hook looks at them. It launches the bucket again
whatever the hook did. This happens once, since from then on every rank leaves the bucket to its hooks. It is impossible
with ``static_graph`` if the gradients move on another rank. Then a bucket with something in ``.grad`` to be added to
waits, on that rank alone, and a hook that has changed a gradient is an error. Values are compared for that, since a
write through ``gradient.data`` changes no version.

Note [Hooks that cannot be seen]
The reducer sees hooks on a parameter, but not those on its AccumulateGrad node. A hook before the node may write
through ``gradient.data``. So values are compared the first time that a bucket is launched early, and in the first
iteration after anyone has registered a hook of any kind. Later writes by such a hook go unnoticed. The device compares
the values as they arrive, and the host reads all results at once, just before the ranks exchange theirs.
"""

import itertools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.errors import this_rank, warning_level
from ddp_compile.runtime.arrivals.accumulators import Accumulators
from ddp_compile.runtime.arrivals.parameter_hooks import ParameterHooks
from ddp_compile.runtime.arrivals.policies import AllRequired
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.buckets.computed_bucket import ComputedBucket
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.desync.model_order import is_agreement_point
from ddp_compile.runtime.launch_queue import LaunchQueue

log = logging.getLogger(__name__)


class EarlyLaunch:
    """Launches buckets that a compiled backward has computed, and repeats launches that were too early.

    ``is_enabled``, the same on every rank, tells whether compiled backwards may hand buckets over.
    """

    def __init__(
        self,
        bucket_set: BucketSet,
        queue: LaunchQueue,
        hooks: ParameterHooks,
        accumulators: Accumulators,
        policy: AllRequired,
        is_enabled: bool,
    ) -> None:
        self._set = bucket_set
        self._queue = queue
        self._hooks = hooks
        self._accumulators = accumulators
        self._policy = policy
        self.is_enabled = is_enabled
        self._has_moved = False  # whether a backward has ever returned other tensors than its gradients
        self._computed: set[tuple[int, ...]] = set()  # the parameters of each bucket that was handed over
        self.ignored: set[tuple[int, ...]] = set()  #: left to their hooks, by parameters
        self._num_hooks_of_others = torch_internals.num_hooks_of_others()

    @property
    def _is_agreement_point(self) -> bool:
        return is_agreement_point(self._set.iteration.number)

    @property
    def has_flags(self) -> bool:
        """Whether the ranks tell each other which buckets were too early; the same on every rank."""
        if not self.is_enabled or not self._set.iteration.has_launched or not self._queue.algorithm.traits.replayable:
            return False
        return self._is_agreement_point or any(bucket.may_launch_early for bucket in self._set.buckets)

    # A compiled backward computes a bucket.

    def is_safe(self, param_indices: tuple[int, ...], moves: bool) -> bool:
        """Whether a bucket may be launched whose gradients a compiled backward has computed.

        ``moves`` tells whether the backward can return other tensors than it has computed.
        """
        num_hooks = torch_internals.num_hooks_of_others()
        if num_hooks != self._num_hooks_of_others:
            self._num_hooks_of_others, self._set.iteration.has_new_hooks = num_hooks, True
        bucket = self._set.of_param_indices.get(param_indices)
        if param_indices in self.ignored or (bucket is None and self._set.buckets):  # of another plan
            return False
        if bucket is not None and (bucket.was_launched_too_early or bucket.iteration.computed is not None):
            return False
        self._computed.add(param_indices)
        if not self._queue.algorithm.traits.replayable or not self._policy.launches_early:
            return False
        if bucket is not None and not bucket.may_launch_early:
            return False
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # there, changes do not change versions
            return False
        if not self._accumulators.are_going_to_run(param_indices):
            return False
        parameters = [self._set.parameters[index] for index in param_indices]
        return not moves or not any(map(_is_observed, parameters)) or all(p.grad is None for p in parameters)

    def launch(self, bucket: Bucket, gradients: Sequence[Tensor], moves: bool) -> None:
        """Launch a bucket with the gradients that a backward returns for it, and watch what becomes of them.

        ``moves`` tells whether the backward can return other tensors than it has computed, on other ranks too.
        """
        is_observed = any(map(_is_observed, bucket.parameters))
        compares_values = is_observed or not bucket.was_launched_early or self._set.iteration.has_new_hooks
        bucket.claim(bucket.gradients())  # while ``.grad`` still shows which views are gradients
        computed = ComputedBucket(bucket, gradients, is_observed, compares_values)
        if is_observed and not moves:
            computed.expect_another_launch()
        self._launch(bucket, computed)

    def can_move(self, bucket: Bucket) -> bool:
        """Whether a backward may return the gradients' places in the flat buffer; compiled code expects aligned ones.

        With a comm hook the places have no padding.
        """
        return bucket.was_launched_early and bucket.is_aligned and not any(map(_is_observed, bucket.parameters))

    def move(self, bucket: Bucket, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Launch a bucket with gradients that are not used after this; returns what the backward returns for them."""
        bucket.claim(bucket.gradients())  # while ``.grad`` says which views are gradients
        views = bucket.new_views()
        self._has_moved = True
        self._launch(bucket, ComputedBucket(bucket, views, False, False, moved=gradients))
        bucket.release_flattened()
        return views

    def _launch(self, bucket: Bucket, computed: ComputedBucket) -> None:
        bucket.mark_computed(computed)
        self._queue.complete_with(bucket, computed.contributions())
        computed.watch()  # after the launch, which may write them: it fills views, and scales a sparse gradient
        if not self._set.notes_arrivals:
            self._hooks.batch(bucket, notify_of_last=False)

    # AccumulateGrad stores its gradients.

    def arrived(self, index: int) -> bool:
        """AccumulateGrad has stored a gradient; returns whether its bucket was launched before that."""
        if not self._set.of_parameter:
            return False
        computed = self._set.of_parameter[index].iteration.computed
        if computed is None:
            return False
        self._set.note_arrival(index)
        self._set.of_parameter[index].note_stream()
        computed.arrive(index)
        return True

    def expose_partial_means(self) -> None:
        """A backward has ended, and another one may bring the missing gradients: hand over the launched buckets."""
        self._compare()
        for bucket in self._set.buckets:
            computed = bucket.iteration.computed
            if computed is None or bucket.iteration.own is not None:
                continue
            if computed.holds_its_own:
                bucket.keep_own([own.clone() for own in computed.own_gradients()])
            else:
                computed.is_lost = True
            bucket.gradient_store.point_at_views(bucket)
            bucket.gradient_store.hand_over(bucket)

    # The iteration ends.

    def flags(self) -> bytearray:
        """After the last launch, this rank's flags. `update` takes those of all ranks.

        There is one for each parameter that got another contribution after its bucket had been launched; one for each
        bucket that cannot be launched again; at agreement points, one for each that may be launched early.
        """
        is_shadow = self._set.iteration.is_shadow  # a shadow has nothing to say
        self._compare()
        late, cannot = bytearray(len(self._set.parameters)), bytearray()
        for bucket in self._set.buckets:
            if bucket.iteration.computed is not None:
                for index in bucket.iteration.computed.late:
                    late[index] = 1
            cannot.append(bucket.may_launch_early and not is_shadow and not _holds_its_own(bucket))
        if not self._is_agreement_point:
            return late + cannot
        return late + cannot + bytearray(bucket.param_indices in self._computed for bucket in self._set.buckets)

    def update(self, flags: Sequence[int]) -> None:
        """Repeat launches that were too early. At agreement points, agree on the buckets that may be launched early.

        ``flags`` are those of `flags` over all ranks: 1 if any rank has set it. Raises a GradientArrivalError on every
        rank if a bucket cannot be launched again, and a ReductionError if a reduction failed.
        """
        buckets, num_parameters = self._set.buckets, len(self._set.parameters)
        late = [index for index in range(num_parameters) if flags[index]]
        cannot = flags[num_parameters : num_parameters + len(buckets)]
        if self._is_agreement_point:
            is_first = self._set.iteration.number == 1
            for bucket, is_computed in zip(buckets, flags[num_parameters + len(buckets) :], strict=True):
                bucket.let_launch_early(bool(is_computed) or (bucket.may_launch_early and not is_first))
        too_early = [bucket for bucket in buckets if not set(late).isdisjoint(bucket.param_indices)]
        for bucket in buckets:
            bucket.note_early_launch(bucket in too_early)
        names = [self._set.names[index] for index in late]
        if any(cannot[bucket.spec.index] for bucket in too_early):
            raise error_messages.contributor_after_launch(names, self._has_moved)
        for bucket in too_early:
            log.log(
                warning_level(self._set.process_group),
                f"{this_rank()}: {bucket.describe()} was launched inside the backward before all its gradients were"
                f" there, because on some rank {', '.join(names)} got more than one gradient. It is launched again, and"
                " will no longer be launched early",
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
