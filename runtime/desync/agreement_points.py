"""In some iterations, the ranks check that all of them have done the same.

Note [Agreement points]
Agreement points are iterations 1, 2, 4, 8, ... and then every 128th. An iteration is one reduction of all buckets of a
model; all models that share a process group are counted together, see Note [Whose message]. Before its last bucket is
launched, each rank adds 1 to a counter in the store that is named by a digest of its fingerprint. When the iteration's
collectives are over, all ranks have added, since the last collective needed them all. So no rank waits for another. A
counter that equals the world size proves that all fingerprints are equal. Each rank asks once, however many ranks there
are. If the counter is lower, the ranks post the fingerprints themselves, and one of them compares them for all, see
Note [One rank reads]. A rank may read before the others have added if ``wait`` returns before a collective is over, as
with NCCL, and if the ranks meet only after the backward, to average parameters. Then it posts, asks again for some
seconds, and leaves the rest to the next agreement point. Fingerprints accumulate, so nothing is missed. What is posted
at an agreement point is deleted at a later one, once all ranks have come to it: then nobody reads it any more.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.config import CheckReplicas
from ddp_compile.errors import this_rank
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.desync.comparison import Comparison
from ddp_compile.runtime.desync.fingerprint import ORDER_WAY_OUT, Fingerprint, ModelFingerprint, describe_differences
from ddp_compile.runtime.desync.group_store import StoreLostError
from ddp_compile.runtime.desync.model_order import ModelOrder
from ddp_compile.runtime.desync.replicas import Replicas

log = logging.getLogger(__name__)


class AgreementPoints:
    """Counts the iterations of one model, and compares the ranks' fingerprints at some of them.

    ``shared`` is the order of the models that share the process group. ``own`` is that of this model alone, for
    iterations that send nothing over that group. ``rank`` and ``ranks`` are global.
    """

    def __init__(
        self,
        shared: ModelOrder,
        own: ModelOrder,
        class_name: str,
        rank: int,
        ranks: Sequence[int],
        check_replicas: CheckReplicas,
    ) -> None:
        self.iteration_number = 1  #: see `Iteration.number`
        self.begins_after_forward = True  #: whether a synchronized forward has come since the previous iteration
        self.is_paused = False  #: while ranks do different things on purpose
        self.num_local_steps = 0
        self.forwards = ForwardsLeftOut()
        self._models = {order: order.add(class_name) for order in (shared, own)}
        self.model = self._models[shared]  #: this model's name among those that share the process group
        self.model_number = shared.number_of(self.model)  #: its number among them, the same on every rank
        self._shared, self._own = shared, own
        self._rank, self._ranks = rank, ranks
        self._backwards_repeated = 0
        self._order, self._mark = shared, 0  # of the latest iteration
        self._digest_of: tuple[BucketPlan, str] | None = None
        self._fingerprints = Comparison("fingerprint", rank, ranks)
        self.replicas = Replicas(check_replicas, own, rank, ranks)

    def last_bucket_is_launched(self, plan: BucketPlan, algorithm: str, is_shared: bool) -> None:
        """Before the last bucket of an iteration is launched, tell the other ranks, if this is an agreement point.

        ``is_shared`` tells whether it is sent over the process group that models share.
        """
        if self._digest_of is None or self._digest_of[0] is not plan:
            self._digest_of = plan, f"{plan.digest} of generation {plan.generation}"
        done = ModelFingerprint(
            plan=self._digest_of[1],
            algorithm=algorithm,
            forwards_left_out=self.forwards.num_left_out,
            backwards_repeated=self._backwards_repeated + (not self.begins_after_forward),
            local_steps=self.num_local_steps,
        )
        self._mark = done.mark
        order = self._order = self._shared if is_shared else self._own
        fingerprint = order.last_bucket_is_launched(self._models[order], done)
        if fingerprint is not None and not self.is_paused:
            self._fingerprints.add(order, fingerprint.number, fingerprint.to_json())
        self.replicas.last_bucket_is_launched(self.iteration_number)

    def compare(self) -> None:
        """At agreement points, after the collectives, compare fingerprints; raises a RanksDifferError on every rank."""
        difference = self._fingerprints.difference(self.iteration_number, _describe)
        if difference is not None:
            raise error_messages.ranks_out_of_step(self.iteration_number, difference)
        self.replicas.compare()

    def iteration_ends(self, next_number: int) -> None:
        """The next launched bucket begins this iteration, which is the same one if nothing was exchanged in it."""
        if next_number != self.iteration_number:
            self._backwards_repeated += not self.begins_after_forward
        self.iteration_number = next_number
        self.forwards.iteration_ends()
        self._fingerprints.forget()
        self.replicas.iteration_ends()

    @property
    def mark(self) -> int:
        """What the ranks compare in the message of every iteration that has one; 0 while they differ on purpose."""
        return 0 if self.is_paused else self._mark

    def refuse_other_message(self) -> NoReturn:
        """Raise the RanksDifferError of every rank: this iteration's message was paired with an unlike one."""
        self.compare()  # an agreement point has begun the next fingerprint
        fingerprint = self._order.fingerprint()
        name, text = f"{fingerprint.number}/again", fingerprint.to_json()
        try:
            difference = self._fingerprints.describe(self._order, name, text, _describe, self.iteration_number)
        except StoreLostError as error:
            difference = None
            log.warning(f"{this_rank()}: the store is gone ({error}), so it cannot say which rank sent what")
        if difference is not None:
            raise error_messages.ranks_out_of_step(self.iteration_number, difference)
        what = (
            "gradients of different models, or of different steps, were averaged with each other. Call every forward,"
            f" backward and optimizer step on every rank. {ORDER_WAY_OUT}"
        )
        raise error_messages.ranks_out_of_step(self.iteration_number, what)


def _describe(texts: Mapping[int, str]) -> str | None:
    return describe_differences({rank: Fingerprint.from_json(text) for rank, text in texts.items()})


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
        # The latest backward that has reached a forward: a local one, another one, or both.
        self._pass, self._kinds_reached = -1, set[bool]()
        self._is_announced = False  # a backward that is reduced whatever it reaches

    @property
    def num_left_out(self) -> int:
        """How many forwards before the latest one that a backward reached."""
        return self._latest_reached - self._num_reached

    @property
    def awaits_backward(self) -> bool:
        """Whether no backward has reached any forward of this iteration yet. False if none is watched."""
        return self._is_watching and not self._is_any_reached

    @property
    def is_local(self) -> bool | None:
        """Whether this backward has reached forwards inside ``no_sync`` only; None if it has reached none."""
        if self._is_announced:
            return False
        return False not in self._kinds_reached if self._kinds_reached else None

    def forward_begins(self) -> None:
        """A forward with gradients begins."""
        if torch_internals.current_graph_task_id() == -1:
            self._kinds_reached, self._is_announced = set(), False  # the last backward may have raised

    def announce_backward(self) -> None:
        """The next backward is reduced, although it reaches forwards inside ``no_sync`` only."""
        self._is_announced = True

    def iteration_ends(self) -> None:
        """Forwards of the next iteration follow."""
        self._is_watching = self._is_any_reached = self._is_announced = False

    def watch(self, outputs: Any, counts: bool = True, is_local: bool = False) -> None:
        """Watch a forward that has returned ``outputs``: tensors in containers that pytree knows, and in dataclasses.

        It is not watched if none of its outputs has an autograd graph. If ``counts``, it counts as left out if no
        backward reaches it; never if ``is_local``, inside ``no_sync``.
        """
        if isinstance(outputs, Tensor):  # by far the most common case
            nodes = [] if outputs.grad_fn is None else [outputs.grad_fn]
        else:
            # Outputs of one compiled graph share one node.
            nodes = list(
                {tensor.grad_fn: None for tensor in torch_internals.tensors_in(outputs) if tensor.grad_fn is not None}
            )
        counts = counts and not is_local
        if nodes:
            self._is_watching |= not is_local
            self._num_watched += counts
            self._set_hooks(nodes, counts, is_local)

    def _note_reached(self, is_local: bool) -> None:
        if (number_of_pass := torch_internals.current_graph_task_id()) != self._pass or not self._kinds_reached:
            self._pass, self._kinds_reached = number_of_pass, set()
            torch_internals.queue_backward_callback(self._pass_ends)
        self._kinds_reached.add(is_local)

    def _pass_ends(self) -> None:
        self._kinds_reached = set()

    def _set_hooks(self, nodes: list[Any], counts: bool, is_local: bool) -> None:
        number, is_reached = self._num_watched, False

        def reach(_gradients: Any) -> None:
            nonlocal is_reached
            self._note_reached(is_local)
            if is_reached or is_local:
                return
            is_reached = self._is_any_reached = True
            if counts:
                self._num_reached += 1
                self._latest_reached = max(self._latest_reached, number)

        for node in nodes:
            torch_internals.register_own(node.register_prehook, reach)
