"""The ranks compare, every so many iterations, whether they have done the same.

Note [Agreement points]
They are iterations 1, 2, 4, 8, ... and then every 128th; an iteration is one reduction of all buckets. Before its last
bucket is launched, each rank adds 1 to a counter in the store whose name is a digest of its fingerprint. When the
iteration's collectives are over, all ranks have done that, since the last one needed them all: nobody waits for
anybody. A counter that has come to the world size proves that all fingerprints are equal, with one question from each
rank, however many ranks there are. Otherwise ranks post the fingerprints themselves, and one compares them for all, see
Note [One rank reads]. The counter of an agreement point is deleted after the next one, which no rank reaches before all
have read the one before. Where ``wait`` returns before a collective is over, as with NCCL, a rank may read before the
others have added. Then it asks again for some seconds and leaves the rest to the next agreement point; what is compared
is never forgotten.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime import error_messages
from ddp_compile.runtime.arrivals.used_parameters import tensors_in
from ddp_compile.runtime.desync.fingerprint import Fingerprint, describe_differences
from ddp_compile.runtime.desync.gathering import Gathering
from ddp_compile.runtime.desync.group_store import ANSWER_LIMIT_S, GroupStore, StoreLostError
from ddp_compile.runtime.rank_names import format_ranks

log = logging.getLogger(__name__)

#: Iterations from one agreement point to the next, once there have been so many.
ITERATIONS_BETWEEN_AGREEMENTS = 128
#: After so many agreement points at which not every rank answered, there are no more.
_MOST_UNANSWERED = 3


def is_agreement_point(iteration_number: int) -> bool:
    """Whether the ranks compare at the end of an iteration; the first one is number 1."""
    if iteration_number < ITERATIONS_BETWEEN_AGREEMENTS:
        return iteration_number.bit_count() == 1
    return iteration_number % ITERATIONS_BETWEEN_AGREEMENTS == 0


class AgreementPoints:
    """Counts iterations, and compares the ranks' fingerprints at some of them.

    Args:
        store: Where ranks tell each other.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, store: GroupStore, rank: int, world_size: int) -> None:
        self.iteration_number = 1  #: of the iteration that is under way or, between iterations, comes next
        self.begins_after_forward = True  #: whether a synchronised forward has come since the iteration before
        self.is_paused = False  #: while ranks do different things by intention
        self.forwards = ForwardsLeftOut()
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._backwards_repeated = 0
        self._digest_of: tuple[BucketPlan, str] | None = None
        self._added: tuple[Fingerprint, str] | None = None  # this rank's fingerprint of the iteration, and its counter
        self._old_counter: str | None = None
        self._num_unanswered = 0

    def last_bucket_is_launched(self, plan: BucketPlan, algorithm: str) -> None:
        """Before the last bucket of an iteration is launched: tell the other ranks, if this is an agreement point.

        Args:
            plan: The plan the bucket belongs to.
            algorithm: Name of the way in which this rank reduces.
        """
        if is_agreement_point(self.iteration_number) and not self.is_paused:
            self._add(plan, algorithm)

    def compare(self) -> None:
        """When the iteration's collectives are over: compare the ranks' fingerprints, if this is an agreement point.

        Raises:
            RanksDifferError: On every rank, naming the ranks and what differs.
        """
        if self._added is None:
            return
        (fingerprint, counter), self._added = self._added, None
        try:
            # Whoever has added to this counter has read the one before, which rank 0 deletes.
            old_counter, self._old_counter = self._old_counter, counter
            forget = old_counter if self._rank == 0 else None
            if not self._store.has_come_to(counter, self._world_size, forget):
                self._compare_fingerprints(fingerprint, counter)
        except StoreLostError as error:
            self._give_up(f"the store of the process group is gone ({error})")

    def iteration_ends(self, has_launched: bool) -> None:
        """The next bucket that is launched begins another iteration.

        Args:
            has_launched: Whether any was launched in this one. A backward that launches none, of a regulariser over a
                few parameters, concerns no other rank and is no iteration.
        """
        if has_launched:
            self.iteration_number += 1
            self._backwards_repeated += not self.begins_after_forward
        self._added = None

    def _add(self, plan: BucketPlan, algorithm: str) -> None:
        if self._store.lost is not None or self._num_unanswered == _MOST_UNANSWERED:
            return
        if self._digest_of is None or self._digest_of[0] is not plan:
            self._digest_of = plan, f"{plan.digest} of generation {plan.generation}"
        fingerprint = Fingerprint(
            plan=self._digest_of[1],
            algorithm=algorithm,
            forwards_left_out=self.forwards.num_left_out,
            backwards_repeated=self._backwards_repeated + (not self.begins_after_forward),
        )
        counter = f"agreement/{fingerprint.digest(self.iteration_number)}"
        try:
            self._store.add(counter, 1)
            self._added = fingerprint, counter
        except StoreLostError as error:
            self._give_up(f"the store of the process group is gone ({error})")

    def _compare_fingerprints(self, fingerprint: Fingerprint, counter: str) -> None:
        keys = [f"fingerprint/{self.iteration_number}/{rank}" for rank in range(self._world_size)]
        self._store.post(keys[self._rank], fingerprint.to_json())

        def agree() -> bool:  # ranks that come later and see it post nothing
            return self._store.has_come_to(counter, self._world_size)

        def describe(found: dict[str, str]) -> str:
            if len(found) < len(keys):
                silent = format_ranks(rank for rank, key in enumerate(keys) if key not in found)
                return "" if agree() else f"silent {silent}"
            difference = describe_differences([Fingerprint.from_json(found[key]) for key in keys])
            return "" if difference is None else f"difference {difference}"

        gathering = Gathering(self._store, f"fingerprint/{self.iteration_number}", keys)
        text = gathering.summary(ANSWER_LIMIT_S, lambda found: len(found) == len(keys) or agree(), describe)
        kind, _, what = ("silent unknown" if text is None else text).partition(" ")
        if kind == "difference":
            raise error_messages.ranks_out_of_step(self._rank, self.iteration_number, what)
        if kind == "silent":
            self._are_silent(what)

    def _are_silent(self, ranks: str) -> None:
        self._num_unanswered += 1
        log.warning(
            "rank %d: ranks that said nothing at the end of iteration %d: %s. Either they are late, or they cannot"
            " reach the store of the process group; nothing was compared",
            self._rank,
            self.iteration_number,
            ranks,
        )
        if self._num_unanswered == _MOST_UNANSWERED:
            self._give_up(f"{_MOST_UNANSWERED} times not every rank answered")

    def _give_up(self, why: str) -> None:
        self._num_unanswered = _MOST_UNANSWERED
        log.warning("rank %d: from now on it is not noticed when ranks get out of step: %s", self._rank, why)


class ForwardsLeftOut:
    """Counts forwards that no backward has reached, although it has reached later ones.

    Several forwards for one backward are no difference between ranks, nor is a forward whose backward is still to come.
    A hook on the autograd node of an output says that a backward has come to it, one that raises further down included:
    such a step may be done over.
    """

    def __init__(self) -> None:
        self._num_watched = 0
        self._num_reached = 0
        self._latest_reached = 0

    @property
    def num_left_out(self) -> int:
        """Of the forwards before the latest one that a backward has reached."""
        return self._latest_reached - self._num_reached

    def watch(self, outputs: Any) -> None:
        """Count a forward that has returned.

        Args:
            outputs: What it returned: tensors in containers that pytree knows, and in dataclasses. Without any that has
                an autograd graph it is not counted.
        """
        if isinstance(outputs, Tensor):  # by far the most frequent case
            nodes = [] if outputs.grad_fn is None else [outputs.grad_fn]
        else:
            # Outputs of one compiled graph have one node.
            nodes = list({tensor.grad_fn: None for tensor in tensors_in(outputs) if tensor.grad_fn is not None})
        if nodes:
            self._num_watched += 1
            self._set_hooks(nodes)

    def _set_hooks(self, nodes: list[Any]) -> None:
        number, is_reached = self._num_watched, False

        def reach(_gradients: Any) -> None:
            nonlocal is_reached
            if not is_reached:
                is_reached = True
                self._num_reached += 1
                self._latest_reached = max(self._latest_reached, number)

        for node in nodes:
            torch_internals.register_own(node.register_prehook, reach)
