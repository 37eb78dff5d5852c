"""In some iterations, the ranks check that all of them have done the same.

Note [Agreement points]
Agreement points are iterations 1, 2, 4, 8, ... and then every 128th. An iteration is one reduction of all buckets of a
model; all models that share a process group are counted together, see Note [Whose message]. Before its last bucket is
launched, each rank adds 1 to a counter in the store that is named by a digest of its fingerprint. When the iteration's
collectives are over, all ranks have added, since the last collective needed them all. So no rank waits for another. A
counter that equals the world size proves that all fingerprints are equal. Each rank asks once, however many ranks there
are. If the counter is lower, the ranks post the fingerprints themselves, and one of them compares them for all, see
Note [One rank reads]. The counter of an agreement point is deleted after the next one, which no rank reaches before all
have read the previous one. If ``wait`` returns before a collective is over, as with NCCL, a rank may read before the
others have added. Then it asks again for some seconds, and leaves the rest to the next agreement point. Fingerprints
accumulate, so nothing is missed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.errors import format_ranks, this_rank
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.desync.fingerprint import ORDER_WAY_OUT, Fingerprint, ModelFingerprint, describe_differences
from ddp_compile.runtime.desync.gathering import Gathering
from ddp_compile.runtime.desync.group_store import ANSWER_LIMIT_S, StoreLostError
from ddp_compile.runtime.desync.model_order import ModelOrder

log = logging.getLogger(__name__)

#: Comparing ends after this many agreement points at which some rank did not answer.
_MOST_UNANSWERED = 3


class AgreementPoints:
    """Counts the iterations of one model, and compares the ranks' fingerprints at some of them.

    Args:
        shared: The order of the models that share the process group.
        own: The order of this model alone, for iterations that send nothing over that group.
        rank: The global rank of this process.
        ranks: The global ranks of the process group.
    """

    def __init__(self, shared: ModelOrder, own: ModelOrder, class_name: str, rank: int, ranks: Sequence[int]) -> None:
        self.iteration_number = 1  #: see `Iteration.number`
        self.begins_after_forward = True  #: whether a synchronized forward has come since the previous iteration
        self.is_paused = False  #: while ranks do different things on purpose
        self._num_local_steps = 0
        self.forwards = ForwardsLeftOut()
        self._models = {order: order.add(class_name) for order in (shared, own)}
        self.model = self._models[shared]  #: this model's name among those that share the process group
        self.model_number = shared.number_of(self.model)  #: its number among them, the same on every rank
        self._shared, self._own = shared, own
        self._rank = rank
        self._ranks = ranks
        self._backwards_repeated = 0
        self._order, self._mark = shared, 0  # of the latest iteration
        self._digest_of: tuple[BucketPlan, str] | None = None
        self._added: _Added | None = None  # what this iteration added
        self._old_counter: str | None = None

    def last_bucket_is_launched(self, plan: BucketPlan, algorithm: str, is_shared: bool) -> None:
        """Before the last bucket of an iteration is launched, tell the other ranks, if this is an agreement point.

        Args:
            is_shared: Whether it is sent over the process group that models share.
        """
        if self._digest_of is None or self._digest_of[0] is not plan:
            self._digest_of = plan, f"{plan.digest} of generation {plan.generation}"
        done = ModelFingerprint(
            plan=self._digest_of[1],
            algorithm=algorithm,
            forwards_left_out=self.forwards.num_left_out,
            backwards_repeated=self._backwards_repeated + (not self.begins_after_forward),
            local_steps=self._num_local_steps,
        )
        self._mark = done.mark
        order = self._order = self._shared if is_shared else self._own
        fingerprint = order.last_bucket_is_launched(self._models[order], done)
        if fingerprint is not None and not self.is_paused:
            self._add(order, fingerprint)

    def sends_buffers(self) -> None:
        """Record that this model sends its buffers over the process group that models share."""
        self._shared.sends("buffers", self.model)

    def local_steps_are(self, number: int) -> None:
        """How often an optimizer has stepped with gradients that no other rank has; see `LocalSteps`."""
        self._num_local_steps = number

    def compare(self) -> None:
        """After an iteration's collectives, compare the ranks' fingerprints, if this is an agreement point.

        Raises:
            RanksDifferError: On every rank, naming the ranks and the difference.
        """
        if self._added is None:
            return
        added, self._added = self._added, None
        order = added.order
        try:
            # A rank that has added to this counter has read this model's previous one, which rank 0 deletes.
            old_counter, self._old_counter = self._old_counter, added.counter
            forget = old_counter if self._rank == self._ranks[0] else None
            if not order.store.has_come_to(added.counter, len(self._ranks), forget):
                self._compare_fingerprints(added)
        except StoreLostError as error:
            self._give_up(order, f"the store of the process group is gone ({error})")

    def iteration_ends(self, next_number: int) -> None:
        """The next launched bucket begins this iteration, which is the same one if nothing was exchanged in it."""
        if next_number != self.iteration_number:
            self._backwards_repeated += not self.begins_after_forward
        self.iteration_number = next_number
        self.forwards.iteration_ends()
        self._added = None

    @property
    def awaits_backward(self) -> bool:
        """See `ForwardsLeftOut.awaits_backward`."""
        return self.forwards.awaits_backward

    @property
    def mark(self) -> int:
        """What the ranks compare in the message of every iteration that has one; 0 while they differ on purpose."""
        return 0 if self.is_paused else self._mark

    def refuse_other_message(self) -> NoReturn:
        """Raise the RanksDifferError of every rank: this iteration's message was paired with an unlike one."""
        self.compare()  # an agreement point has begun the next fingerprint
        try:
            self._compare_fingerprints(_Added.of(self._order, self._order.fingerprint()))
        except StoreLostError as error:
            log.warning("%s: the store is gone (%s), so it cannot say which rank sent what", this_rank(), error)
        what = (
            "gradients of different models, or of different steps, were averaged with each other. Call every forward,"
            f" backward and optimizer step on every rank. {ORDER_WAY_OUT}"
        )
        raise error_messages.ranks_out_of_step(self.iteration_number, what)

    def _add(self, order: ModelOrder, fingerprint: Fingerprint) -> None:
        if order.store.lost is not None or order.num_unanswered == _MOST_UNANSWERED:
            return
        added = _Added.of(order, fingerprint)
        try:
            order.store.add(added.counter, 1)
            self._added = added
        except StoreLostError as error:
            self._give_up(order, f"the store of the process group is gone ({error})")

    def _compare_fingerprints(self, added: _Added) -> None:
        order, fingerprint, counter = added
        store, name = order.store, f"{order.prefix}fingerprint/{fingerprint.number}"
        keys = {rank: f"{name}/{rank}" for rank in self._ranks}
        store.post(keys[self._rank], fingerprint.to_json())

        def agree() -> bool:  # ranks that see it later post nothing
            return store.has_come_to(counter, len(keys))

        def describe(found: dict[str, str]) -> str:
            if len(found) < len(keys):
                silent = format_ranks(rank for rank, key in keys.items() if key not in found)
                return "" if agree() else f"silent {silent}"
            difference = describe_differences({rank: Fingerprint.from_json(found[key]) for rank, key in keys.items()})
            return "" if difference is None else f"difference {difference}"

        gathering = Gathering(store, name, list(keys.values()))
        text = gathering.summary(ANSWER_LIMIT_S, lambda found: len(found) == len(keys) or agree(), describe)
        kind, _, what = ("silent unknown" if text is None else text).partition(" ")
        if kind == "difference":
            raise error_messages.ranks_out_of_step(self.iteration_number, what)
        if kind == "silent":
            self._count_silence(order, what)

    def _count_silence(self, order: ModelOrder, ranks: str) -> None:
        order.num_unanswered += 1
        log.warning(
            "%s: these ranks posted nothing at the end of iteration %d: %s. Either they are late, or they cannot reach"
            " the store of the process group; nothing was compared",
            this_rank(),
            self.iteration_number,
            ranks,
        )
        if order.num_unanswered == _MOST_UNANSWERED:
            self._give_up(order, f"some rank did not answer {_MOST_UNANSWERED} times")

    def _give_up(self, order: ModelOrder, why: str) -> None:
        order.num_unanswered = _MOST_UNANSWERED
        log.warning("%s: from now on, ranks that get out of step are not noticed: %s", this_rank(), why)


class _Added(NamedTuple):
    """What this rank added to the store in an iteration."""

    order: ModelOrder  #: whose iterations are compared
    fingerprint: Fingerprint
    counter: str  #: the key of the counter that it has added to

    @classmethod
    def of(cls, order: ModelOrder, fingerprint: Fingerprint) -> _Added:
        return cls(order, fingerprint, f"{order.prefix}agreement/{fingerprint.digest}")


class ForwardsLeftOut:
    """Counts forwards that no backward reached although a backward reached a later forward.

    Several forwards for one backward do not count, nor does a forward whose backward may still come. A hook on the
    autograd node of an output notices that a backward reaches it, even if the backward raises later, since such a step
    may be repeated.
    """

    def __init__(self) -> None:
        # Of the forwards that count.
        self._num_watched = 0
        self._num_reached = 0
        self._latest_reached = 0
        # Of all forwards, in this iteration.
        self._is_watching, self._is_any_reached = False, False

    @property
    def num_left_out(self) -> int:
        """How many forwards before the latest one that a backward reached."""
        return self._latest_reached - self._num_reached

    @property
    def awaits_backward(self) -> bool:
        """Whether no backward has reached any forward of this iteration yet. False if none is watched."""
        return self._is_watching and not self._is_any_reached

    def iteration_ends(self) -> None:
        """Forwards of the next iteration follow."""
        self._is_watching, self._is_any_reached = False, False

    def watch(self, outputs: Any, counts: bool = True) -> None:
        """Watch a forward that has returned.

        Args:
            outputs: What it returned: tensors in containers that pytree knows, and in dataclasses. A forward is not
                watched if none of its outputs has an autograd graph.
            counts: Whether it counts as left out if no backward reaches it.
        """
        if isinstance(outputs, Tensor):  # by far the most common case
            nodes = [] if outputs.grad_fn is None else [outputs.grad_fn]
        else:
            # Outputs of one compiled graph share one node.
            nodes = list(
                {tensor.grad_fn: None for tensor in torch_internals.tensors_in(outputs) if tensor.grad_fn is not None}
            )
        if nodes:
            self._is_watching = True
            self._num_watched += counts
            self._set_hooks(nodes, counts)

    def _set_hooks(self, nodes: list[Any], counts: bool) -> None:
        number, is_reached = self._num_watched, False

        def reach(_gradients: Any) -> None:
            nonlocal is_reached
            if is_reached:
                return
            is_reached = self._is_any_reached = True
            if counts:
                self._num_reached += 1
                self._latest_reached = max(self._latest_reached, number)

        for node in nodes:
            torch_internals.register_own(node.register_prehook, reach)
