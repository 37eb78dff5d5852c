"""Buckets that leave inside a compiled backward, before AccumulateGrad has seen their gradients.

Note [Leaving before AccumulateGrad]
Inside a compiled backward nobody knows whether another contribution to a gradient is still to come: from a
regulariser, a second forward, a layer used twice. So some rounds teach: the first one and, as graphs are compiled
later too, every agreement point (`agreement_points`). A bucket that may not leave early yet is watched there, and has
one contributor if one graph offered it once and each ``.grad`` then was the very tensor that was offered. The ranks
agree on those buckets, and from then on they leave when a graph offers them; one that was found late never does again.

What was offered is kept as a detached alias until the round ends. The engine adds a second contribution *in place* into
a gradient whose memory nobody else holds; with the alias it makes a new tensor, which shows. A hook that writes into
the gradient changes its version. A second arrival shows by itself.

If another contribution comes after all, the bucket left too early. In each round the ranks tell each other, behind the
last bucket, to which parameters that happened. Every rank still has its own gradients: in ``.grad``, which only the end
of a round points at the flat buffer, or kept aside where the bucket has left by its hooks. So every rank sends those
buckets again, with what is complete now, and lets them leave by their hooks from then on. The result is exact. Where
the algorithm is not replayable, as comm hooks, every rank raises. So it does where gradients move: with
``static_graph`` a backward may return views of the flat buffer, and this rank's own gradients are gone when their
bucket has left.

Note [Leaving in sight]
A backward may have collectives of its own, a synchronised BatchNorm's for example, in the same process group. They meet
their counterparts only if all ranks let their buckets leave at the same places among them. So what one rank alone knows
must not hold a bucket back: that somebody has put a hook on a parameter there, for example. Such a bucket leaves as the
others do, but its ``.grad`` is not taken away, and its gradients do not move, since somebody looks at them. It is sent
again whatever the hooks did, which happens once, as it waits for its hooks from then on, on every rank. With a comm
hook it cannot be sent again, nor with ``static_graph`` where nobody looks on some rank. Then a bucket in whose
``.grad`` there is something to be added to waits on that rank alone, and it is an error if the hooks have changed a
gradient. Its values tell, since what is written through ``gradient.data`` shows in no version.

Note [Hooks that nobody sees]
Hooks on a parameter can be seen, those on its AccumulateGrad node cannot. A hook before the node may write through
``gradient.data``, so values are compared in rounds that teach, and in the first round after somebody has registered a
hook, of whatever kind. What such a hook does later than that goes unnoticed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.runtime.accumulators import Accumulators
from ddp_compile.runtime.agreement_points import is_agreement_point
from ddp_compile.runtime.bucket_buffer import BucketBuffer
from ddp_compile.runtime.bucket_offer import BucketOffer, OfferRole

log = logging.getLogger(__name__)

Members = tuple[int, ...]


class Verdict(NamedTuple):
    """What the ranks have found about one round; the same on every rank.

    Args:
        late: Parameters that on some rank got another contribution after their bucket had left.
        buckets: Their buckets, in launch order.
        repeatable: Whether every rank can send those buckets again.
    """

    late: list[int]
    buckets: list[BucketBuffer]
    repeatable: bool


class EarlyBuckets:
    """Learns which buckets may leave inside a compiled backward, watches them, and finds those that left too early.

    Args:
        parameters: In registration order; they are spoken of by their number.
        accumulators: Theirs.
        rank: This rank, for the log.
    """

    def __init__(self, parameters: Sequence[Parameter], accumulators: Accumulators, rank: int) -> None:
        self._parameters = tuple(parameters)
        self._rank = rank
        self._accumulators = accumulators
        self.has_moved = False  #: whether a backward has ever returned other tensors than its gradients
        # The same on every rank, as is the number of the round.
        self._allowed: frozenset[Members] = frozenset()
        self._barred: frozenset[Members] = frozenset()  # they have left too early once
        self._round_number = 1
        self._has_learnt = False
        self._place_of: dict[int, tuple[Members, int]] = {}  # in the buckets that graphs have offered so far
        self._ignored: set[Members] = set()
        # What follows belongs to one round.
        self._offers: dict[Members, BucketOffer] = {}
        self._own: dict[Members, list[Tensor]] = {}  # this rank's gradients where `.grad` has them no longer
        self._late: set[int] = set()
        self._unrepeatable: set[Members] = set()
        self._num_hooks_of_others = torch_internals.num_hooks_of_others()
        self._has_new_hooks = False

    def ignore(self, buckets: Sequence[Members]) -> None:
        """Graphs that offer these buckets run for other parameters as well, and offer those gradients as these."""
        self._ignored.update(buckets)

    def offer(self, members: Members, repeatable: bool) -> OfferRole:
        """A compiled backward has computed all gradients of a bucket.

        Args:
            members: The bucket's parameters.
            repeatable: Whether the bucket could be sent twice.

        Returns:
            What becomes of it. Unless it waits, `follow` is to be called.
        """
        num_hooks = torch_internals.num_hooks_of_others()
        if num_hooks != self._num_hooks_of_others:
            self._num_hooks_of_others, self._has_new_hooks = num_hooks, True
        is_allowed = members in self._allowed
        teaches = not is_allowed and self.is_learning and members not in self._barred
        if not (is_allowed or teaches) or members in self._offers or members in self._ignored:
            return OfferRole.WAITS
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # there, changes show in no version
            return OfferRole.WAITS
        if not self._accumulators.are_going_to_run(members):
            return OfferRole.WAITS
        if any(_is_looked_at(self._parameters[index]) for index in members):
            may_leave = repeatable or all(self._parameters[index].grad is None for index in members)
            return OfferRole.LEAVES_IN_SIGHT if is_allowed and may_leave else OfferRole.WAITS
        return OfferRole.LEAVES if is_allowed else OfferRole.TEACHES

    def follow(self, members: Members, gradients: Sequence[Tensor], role: OfferRole, moves: bool) -> None:
        """Watch what becomes of the gradients of a bucket.

        Args:
            members: The bucket's parameters.
            gradients: What the backward will return for them.
            role: What `offer` returned.
            moves: Whether that is not its own gradients; then they cannot be sent again.
        """
        if moves:
            self._unrepeatable.add(members)
            self.has_moved = True
        self._place_of.update({index: (members, place) for place, index in enumerate(members)})
        compares_values = not moves and (role is not OfferRole.LEAVES or self._has_new_hooks)
        self._offers[members] = BucketOffer(
            [self._parameters[index] for index in members], gradients, role, compares_values
        )

    def expect_to_send_again(self, members: Members) -> None:
        """A bucket that is followed has left too early, whatever is found."""
        self._late.update(members)
        self._offers[members].is_compared = True

    def awaited(self, members: Members) -> set[int]:
        """The parameters of a bucket that has been flattened whose gradients have not been accumulated yet.

        Whoever learns of one first may strike it off without telling: what matters of it is compared when the round
        ends.
        """
        offer = self._offers[members]
        offer.watch()  # gradients that move lie in the buffer, which has been written
        offer.awaited.update(members)
        return offer.awaited

    def contributions(self, bucket: BucketBuffer, moved: Sequence[Tensor] | None = None) -> list[Tensor]:
        """What a bucket that leaves has to send: its gradients, and what earlier backwards had left in ``.grad``.

        Args:
            bucket: A bucket that is followed.
            moved: Its gradients where the backward returns other tensors.
        """
        offer = self._offers[bucket.members]
        if not offer.in_sight and bucket.holds_zeros(offer.before):
            # ``.grad`` will be the same views again, and there is nothing to add: zero_grad(set_to_none=False).
            offer.before = [None] * len(offer.before)
        if moved is not None:
            return _sums(offer.before, moved)
        # What lies in the flat buffer will be overwritten, and is needed once more if the bucket is sent again.
        before = [old.clone() if old is not None and bucket.holds(old) else old for old in offer.before]
        if offer.in_sight:
            offer.before = [None] * len(before)
            for parameter, old in zip(bucket.parameters, before, strict=True):
                parameter.grad = old
        else:
            offer.before = before
        return _sums(before, offer.aliases)

    def keep(self, bucket: BucketBuffer, gradients: Sequence[Tensor]) -> None:
        """A bucket leaves by its hooks, and may have to be sent again if it has left early on another rank.

        Args:
            bucket: The bucket.
            gradients: What this rank sends; it will be written over, or is not ``.grad`` any more.
        """
        if bucket.members in self._allowed:
            # Not the gradients themselves, which would look as if somebody else held them.
            self._own[bucket.members] = [g.clone() if bucket.holds(g) else g.detach() for g in gradients]

    def arrived(self, index: int) -> bool:
        """AccumulateGrad has stored a gradient.

        Returns:
            Whether nobody waits for it, because its bucket has left in this round.
        """
        if index not in self._place_of:
            return False
        members, place = self._place_of[index]
        offer = self._offers.get(members)
        if offer is None:
            return False
        if offer.left:
            if index in offer.awaited:
                offer.awaited.remove(index)
            else:
                self._late.add(index)
                if members in self._own:
                    self._unrepeatable.add(members)  # it has been handed over for now, without this
            return True
        parameter = self._parameters[index]
        if place in offer.arrived or offer.is_changed(place, parameter.grad):
            offer.has_more = True
        old = offer.before[place]
        if old is not None and place not in offer.arrived:
            # As AccumulateGrad would have done it, had the gradient of before been there.
            parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)
        offer.arrived.add(place)
        return False

    def hand_over_for_now(self, buckets: Sequence[BucketBuffer]) -> None:
        """A backward has ended and another one may bring the rest: what has left must be averaged all the same."""
        for bucket in buckets:
            offer = self._offers.get(bucket.members)
            if offer is not None and offer.left and bucket.members not in self._own:
                self._compare(bucket.members, offer)
                if self._holds_its_own(bucket):
                    self._own[bucket.members] = [own.clone() for own in self.own_gradients(bucket)]
                else:
                    self._unrepeatable.add(bucket.members)
                bucket.point_gradients_at_views()
                bucket.hand_over()

    def _compare(self, members: Members, offer: BucketOffer) -> None:
        """Find the parameters whose ``.grad`` is not, or not only, what was offered."""
        if not offer.is_compared:
            gradients = (self._parameters[index].grad for index in members)
            places = enumerate(zip(members, gradients, strict=True))
            self._late.update(index for place, (index, grad) in places if offer.is_changed(place, grad))
        offer.is_compared = True

    def _has_one_contributor(self, members: Members) -> bool:
        offer = self._offers.get(members)
        return offer is not None and not offer.left and len(offer.arrived) == len(members) and not offer.has_more

    @property
    def is_learning(self) -> bool:
        """Whether buckets are watched in this round to learn whether they may leave early, on every rank."""
        return not self._has_learnt or is_agreement_point(self._round_number)

    @property
    def speaks(self) -> bool:
        """Whether the ranks need to hear of each other at the end of this round; the same on every rank."""
        return bool(self._allowed) or self.is_learning

    def message(self, buckets: Sequence[BucketBuffer], repeatable: bool) -> bytearray:
        """When the last bucket has left: which left too early, and which may leave so. `verdict` reads it.

        Args:
            buckets: All buckets.
            repeatable: Whether a bucket may be sent twice in a round at all.

        Returns:
            A flag for each parameter that got another contribution after its bucket had left; one for each bucket that
            cannot be sent again; one for each that does not have one contributor.
        """
        for members, offered in self._offers.items():
            if offered.left:
                self._compare(members, offered)
        late, unrepeatable, has_more = bytearray(len(self._parameters)), bytearray(), bytearray()
        for index in self._late:
            late[index] = 1
        for bucket in buckets:
            is_allowed = bucket.members in self._allowed
            unrepeatable.append(is_allowed and not (repeatable and self._holds_its_own(bucket)))
            has_more.append(self.is_learning and not self._has_one_contributor(bucket.members))
        return late + unrepeatable + has_more

    def _holds_its_own(self, bucket: BucketBuffer) -> bool:
        """Whether this rank's complete gradients of a bucket that has left are at hand."""
        members = bucket.members
        if members in self._unrepeatable:
            return False
        if members in self._own:
            return True
        offer = self._offers.get(members)
        if offer is None or not offer.left:
            return False
        return self._late.isdisjoint(members) or all(gradient is not None for gradient in bucket.gradients())

    def verdict(self, buckets: Sequence[BucketBuffer], said: Sequence[int]) -> Verdict:
        """What has to be done about this round.

        Args:
            buckets: All buckets.
            said: The flags of `message` over all ranks: 1 where any rank has said so.
        """
        late = [index for index in range(len(self._parameters)) if said[index]]
        is_unrepeatable, has_more = said[len(self._parameters) : -len(buckets)], said[-len(buckets) :]
        if self.is_learning:
            self._learn([bucket.members for bucket, more in zip(buckets, has_more, strict=True) if not more], buckets)
        if not late:
            return Verdict([], [], True)
        affected = [bucket for bucket in buckets if not set(late).isdisjoint(bucket.members)]
        repeatable = not any(is_unrepeatable[bucket.spec.index] for bucket in affected)
        self._barred = self._barred.union(bucket.members for bucket in affected)
        self._allowed -= self._barred
        return Verdict(late, affected, repeatable)

    def _learn(self, agreed: Sequence[Members], buckets: Sequence[BucketBuffer]) -> None:
        """Let buckets leave early from now on that had one contributor on every rank."""
        if agreed or not self._has_learnt:
            log.info(
                "rank %d: %d of %d buckets may leave inside the compiled backward, %d of them since round %d",
                self._rank,
                len(self._allowed) + len(agreed),
                len(buckets),
                len(agreed),
                self._round_number,
            )
        self._allowed = self._allowed.union(agreed)
        self._has_learnt = True

    def own_gradients(self, bucket: BucketBuffer) -> list[Tensor]:
        """This rank's gradients of a bucket that has left in this round, complete now."""
        if bucket.members in self._own:
            return self._own[bucket.members]
        gradients = [gradient for gradient in bucket.gradients() if gradient is not None]
        return _sums(self._offers[bucket.members].before, gradients)

    def put_back(self) -> None:
        """Let ``.grad`` be the tensors that they were before the round, for the result to be copied into."""
        for members, offer in self._offers.items():
            olds, offer.before = offer.before, [None] * len(members)
            for index, old in zip(members, olds, strict=True):
                if offer.left and old is not None:
                    self._parameters[index].grad = old
                    increment_version(old)  # as if AccumulateGrad had added to it

    def begin_round(self, has_sent: bool) -> None:
        """Forget what belongs to the round that has ended.

        Args:
            has_sent: Whether anything has left in it: otherwise the other ranks know nothing of it.
        """
        self._round_number += has_sent
        self._offers.clear()
        self._own.clear()
        self._late.clear()
        self._unrepeatable.clear()
        self._has_new_hooks = False


def _is_looked_at(parameter: Parameter) -> bool:
    """Whether taking ``.grad`` away for a while could be noticed, or cannot be made good."""
    if torch_internals.has_gradient_hooks(parameter):
        return True
    return parameter.grad is not None and parameter.grad.layout is not torch.strided


def _sums(before: Sequence[Tensor | None], gradients: Sequence[Tensor]) -> list[Tensor]:
    # In this order: a sparse gradient of before can be added to a dense one.
    return [new if old is None else new + old for old, new in zip(before, gradients, strict=True)]
