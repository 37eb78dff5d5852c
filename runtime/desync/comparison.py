"""The ranks compare a text through the store of their process group, without waiting for each other."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence

from ddp_compile.errors import format_ranks, this_rank
from ddp_compile.runtime.desync.gathering import Gathering, summary_keys
from ddp_compile.runtime.desync.group_store import ANSWER_LIMIT_S, StoreLostError
from ddp_compile.runtime.desync.model_order import ModelOrder

log = logging.getLogger(__name__)

#: Comparing ends after this many agreement points at which some rank did not answer.
_MOST_UNANSWERED = 3

#: Says how the ranks' texts differ; None if they do not.
Describe = Callable[[Mapping[int, str]], str | None]


class Comparison:
    """Compares one kind of text, at agreement points; see Note [Agreement points]."""

    def __init__(self, kind: str, rank: int, ranks: Sequence[int]) -> None:
        self._kind, self._rank, self._ranks = kind, rank, ranks
        self._is_first = rank == ranks[0]  # it deletes what the ranks share
        self._added: tuple[ModelOrder, int, str, str] | None = None  # order, number, counter and text
        # Keys that this rank deletes: those of the latest agreement point, and older ones. Some may not exist.
        self._keys: list[str] = []
        self._old_keys: list[str] = []

    def add(self, order: ModelOrder, number: int, text: str) -> None:
        """Before the last bucket of an iteration is launched, add to the counter that a digest of the text names.

        ``number`` is that of the iteration in ``order``, the same on every rank.
        """
        if order.store.lost is not None or order.num_unanswered == _MOST_UNANSWERED:
            return
        counter = f"{order.prefix}{self._kind}/agreement/{number}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self._old_keys += self._keys
        self._keys = [counter, *summary_keys(f"{order.prefix}{self._kind}/{number}")] if self._is_first else []
        try:
            order.store.add(counter, 1)
            self._added = order, number, counter, text
        except StoreLostError as error:
            self._give_up(order, f"the store of the process group is gone ({error})")

    def forget(self) -> None:
        """Compare nothing in this iteration."""
        self._added = None

    def difference(self, iteration_number: int, describe: Describe) -> str | None:
        """After the iteration's collectives, how the ranks' texts differ; None if they are equal, or it is unknown.

        One rank calls ``describe``, for all. ``iteration_number`` is for messages.
        """
        if self._added is None:
            return None
        (order, number, counter, text), self._added = self._added, None

        def agree() -> bool:
            return order.store.add(counter, 0) == len(self._ranks)

        try:
            if agree():
                self._all_have_come(order)
                return None
            # Asked again there, since a rank that comes later may find that all agree, and post nothing.
            return self.describe(order, str(number), text, describe, iteration_number, agree)
        except StoreLostError as error:
            self._give_up(order, f"the store of the process group is gone ({error})")
            return None

    def describe(
        self,
        order: ModelOrder,
        name: str,
        text: str,
        describe: Describe,
        iteration_number: int,
        agree: Callable[[], bool] = lambda: False,
    ) -> str | None:
        """Post a text, and return what one rank says about those of all ranks; None if some rank posts none.

        ``name`` is part of the names of the keys, equal on every rank; ``agree`` tells whether it has turned out that
        all texts are equal. Raises StoreLostError.
        """
        prefix = f"{order.prefix}{self._kind}/{name}"
        keys = {rank: f"{prefix}/{rank}" for rank in self._ranks}
        # Once: a rank that comes late must do what the others do, which may be to repair parameters, or to go on.
        gathering = Gathering(order.store, prefix, list(keys.values()), once=True)
        self._keys += [keys[self._rank], *(summary_keys(prefix) if self._is_first else ())]
        order.store.post(keys[self._rank], text)

        def summarize(found: dict[str, str]) -> str:
            if len(found) < len(keys):
                silent = format_ranks(rank for rank, key in keys.items() if key not in found)
                return "" if agree() else f"silent {silent}"
            difference = describe({rank: found[key] for rank, key in keys.items()})
            return "" if difference is None else f"difference {difference}"

        said = gathering.summary(ANSWER_LIMIT_S, lambda found: len(found) == len(keys) or agree(), summarize)
        kind, _, what = ("silent unknown" if said is None else said).partition(" ")
        if kind == "silent":
            self._count_silence(order, what, iteration_number)
        else:
            self._all_have_come(order)
        return what if kind == "difference" else None

    def _all_have_come(self, order: ModelOrder) -> None:
        if order.num_unanswered < _MOST_UNANSWERED:
            order.num_unanswered = 0  # those that did not answer were late
        # A rank that has come to this agreement point reads nothing of earlier ones any more.
        old_keys, self._old_keys = self._old_keys, []
        if old_keys:
            try:
                order.store.delete(old_keys)
            except StoreLostError as error:  # what was found still counts
                self._give_up(order, f"the store of the process group is gone ({error})")

    def _count_silence(self, order: ModelOrder, ranks: str, iteration_number: int) -> None:
        order.num_unanswered += 1
        log.warning(
            f"{this_rank()}: these ranks posted nothing at the end of iteration {iteration_number}: {ranks}. Either"
            " they are late, or they cannot reach the store of the process group; nothing was compared"
        )
        if order.num_unanswered == _MOST_UNANSWERED:
            self._give_up(order, f"some rank did not answer {_MOST_UNANSWERED} times")

    def _give_up(self, order: ModelOrder, why: str) -> None:
        order.num_unanswered = _MOST_UNANSWERED
        log.warning(f"{this_rank()}: from now on, ranks that get out of step are not noticed: {why}")
