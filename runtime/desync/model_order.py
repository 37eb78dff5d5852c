"""The order in which models that share a process group send.

Note [Whose message]
Collectives pair up by order alone, across all models that reduce in one process group. If one rank calls the backwards
of two models of equal sizes in another order, each model gets the other one's gradients. So the ranks also compare the
order of the models' iterations. Agreement points count the iterations of all models in the process group. All ranks
reach them together, even if one of them sends another model's bucket there: the last bucket of the n-th iteration is
always paired with that of the n-th iteration on every other rank. A model's iterations are compared at the next
agreement point, which may be in another model's iteration.

If an algorithm sends over its own process groups, its model cannot be mixed up with others. Each such model has its own
order.
"""

import weakref
from collections import deque
from typing import Literal

import torch.distributed as dist

from ddp_compile.runtime.desync.fingerprint import Fingerprint, ModelFingerprint
from ddp_compile.runtime.desync.group_store import GroupStore

#: Iterations from one agreement point to the next, after the first this many iterations.
ITERATIONS_BETWEEN_AGREEMENTS = 128


def is_agreement_point(iteration_number: int) -> bool:
    """Whether the ranks compare at the end of an iteration; the first one is number 1."""
    if iteration_number < ITERATIONS_BETWEEN_AGREEMENTS:
        return iteration_number.bit_count() == 1
    return iteration_number % ITERATIONS_BETWEEN_AGREEMENTS == 0


class ModelOrder:
    """The order in which the models that share a process group send gradients and buffers over it, on this rank."""

    def __init__(self, store: GroupStore, prefix: str = "") -> None:
        self.store = store
        self.prefix = prefix
        self.num_unanswered = 0  #: agreement points at which some rank did not answer
        self.num_iterations = 0  #: iterations of all models
        self._numbers: dict[str, int] = {}  # of the models, by name
        self._num_before_latest_model = 0
        self._digest = 0
        self._latest: deque[str] = deque(maxlen=2 * ITERATIONS_BETWEEN_AGREEMENTS)
        self._done: dict[str, ModelFingerprint] = {}  # iterations since the last agreement point

    def add(self, class_name: str) -> str:
        """Add a model, on every rank the same ones in the same order; returns its name in errors."""
        number = len(self._numbers) + 1
        name = f"model {number} ({class_name})"
        self._numbers[name] = number
        self._num_before_latest_model = self.num_iterations
        return name

    def sends(self, what: Literal["gradients", "buffers"], model: str) -> None:
        """Record what a model sends over the process group, if there are several models."""
        if len(self._numbers) > 1:
            place = 2 * self._numbers[model] + (what == "gradients")
            self._digest = (self._digest * 1_000_003 + place) % (2**61 - 1)
            self._latest.append(f"the {what} of {model}")

    def last_bucket_is_launched(self, model: str, done: ModelFingerprint) -> Fingerprint | None:
        """Record an iteration; returns the fingerprint to compare if this is an agreement point."""
        self.sends("gradients", model)
        self.num_iterations += 1
        self._done[model] = done
        # The count restarts with each new model, since ranks differ most often in a model's first iterations.
        if not is_agreement_point(self.num_iterations - self._num_before_latest_model):
            return None
        return self.fingerprint(forget=True)

    def number_of(self, model: str) -> int:
        """The first model is number 1."""
        return self._numbers[model]

    def fingerprint(self, forget: bool = False) -> Fingerprint:
        """The fingerprint that has to be equal on all ranks now; to ``forget`` starts the next one anew."""
        done = dict(self._done)
        if forget:
            self._done.clear()
        return Fingerprint(
            number=self.num_iterations, models=done, order=f"{self._digest:x}", latest=tuple(self._latest)
        )


#: The orders of the process groups that modules were given.
_ORDERS: weakref.WeakKeyDictionary[dist.ProcessGroup, ModelOrder] = weakref.WeakKeyDictionary()


def order_in(process_group: dist.ProcessGroup, store: GroupStore) -> ModelOrder:
    """The order of the models that share a process group."""
    return _ORDERS.setdefault(process_group, ModelOrder(store))
