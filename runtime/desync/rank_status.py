"""Where each rank is: noted at every step of the training loop, and reported when a collective fails.

Note [What a post may cost]
A rank posts where it is to the store, so that others can read it when the rank can no longer answer. Posts are paid
from a budget of 0.1 % of the elapsed time. Usually every note is posted; with steps of a few milliseconds, many are
not. A post costs the time that it takes here, as a moving average, but at least the time that the posts of all ranks
take on the single thread of the store's server. If posts stay on a disk forever (FileStore), the budget is one post a
second. A note that is not posted takes less than a microsecond, and its text is not made.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from ddp_compile.errors import ReductionError, format_ranks
from ddp_compile.runtime.desync.gathering import Gathering
from ddp_compile.runtime.desync.group_store import GroupStore, StoreLostError

_SHARE_OF_TIME = 0.001
_SERVER_S = 5e-6  # a post on the server of a TCPStore: 1.4 us was measured on an idle machine
_GROWING_STORE_S = 1e-3
_MOST_POSTS_SAVED = 32
_MOST_CHARACTERS = 200  # of another rank's error
#: How long a rank whose collective failed waits for the others to report where theirs failed.
WAIT_FOR_OTHERS_S = 1.0
_TICKETS_S = 0.2  # how long it waits at least, since ranks do not come at the same time
#: How long a rank waits until the others have read the table, if the store ends with its process.
OWNER_STAYS_S = 3.0


class RankStatus(NamedTuple):
    """Where one rank was."""

    at: str  #: the step of the training loop
    since: float  #: when it got there, in seconds of its machine's clock
    failed: bool  #: whether it raised there

    def to_text(self) -> str:
        return f"{self.since} {int(self.failed)} {self.at}"

    @classmethod
    def from_text(cls, text: str) -> Self:
        since, failed, at = text.split(" ", 2)
        return cls(at, float(since), failed == "1")


class RankStatuses:
    """Where this rank is, and where the others were when they last posted."""

    def __init__(
        self, store: GroupStore, rank: int, ranks: Sequence[int], at: str = "before the first forward"
    ) -> None:
        self._store = store
        self._own_key = f"rank_status/{rank}"
        self._keys = {f"rank_status/{other}": other for other in ranks}
        self._gathering = Gathering(store, "statuses", list(self._keys))
        self._failure: RankStatus | None = None
        self._noted: tuple[str, int | None, str] = (at, None, "")
        self._noted_at = time.perf_counter()
        self._least_charge_s = max(_SERVER_S * len(ranks), _GROWING_STORE_S if store.only_grows else 0.0)
        self._post(self.now)
        self._budget_at = self._next_post_at = time.perf_counter()
        self._post_s = self._budget_at - self._noted_at
        self._budget_s = _MOST_POSTS_SAVED * self._least_charge_s

    @property
    def now(self) -> RankStatus:
        if self._failure is not None:
            return self._failure
        at, number, then = self._noted
        text = f"{at}{then}" if number is None else f"{at} {number}{then}"
        return RankStatus(text, time.time() - (time.perf_counter() - self._noted_at), failed=False)

    def note(self, at: str, number: int | None = None, then: str = "", waits_for_all: bool = False) -> None:
        """This rank has reached another step of the training loop. Posted if the budget allows it.

        Args:
            at: The step, "training forward" for example.
            number: Counts such steps, from 1.
            then: Text after the number.
            waits_for_all: Post it in any case: a rank that went on to train has nothing else to learn it from.
        """
        self._noted = (at, number, then)
        self._noted_at = now = time.perf_counter()
        self._failure = None
        if waits_for_all or now >= self._next_post_at:
            self._post_from_budget(now)

    def fail(self, then: str) -> None:
        """This rank raises; posted at once, unless it has posted a failure before."""
        if self._failure is None:
            at, since, _ = self.now
            self._failure = RankStatus(f"{at}{then}", since, failed=True)
            self._post(self._failure)

    def raised(self, error: BaseException) -> None:
        """Like `fail`, for an error that the reducer did not raise."""
        first_line = (str(error).strip().splitlines() or [""])[0][:_MOST_CHARACTERS]
        self.fail(f": raised {type(error).__name__}: {first_line}")

    def report_failure(self, error: ReductionError, what: str = "") -> ReductionError:
        """The error of a failed collective, with a table of where every rank is.

        Waits about a second for ranks whose collectives fail at the same time. ``what`` is text after the step that
        this rank is in, ", bucket 0" for example.
        """
        if len(self._keys) == 1:
            return error
        self.fail(f"{what}: failed")
        return ReductionError(f"{error}\n{self.report()}")

    def report(self) -> str:
        """Where every rank was when it last posted, as text of several lines. Call it after `fail`.

        One rank reads for all, see Note [One rank reads], and waits at most a second for the others to fail too. The
        rank that holds the store stays until the others have read the table, for at most three seconds.
        """
        try:
            table = self._gathering.summary(WAIT_FOR_OTHERS_S, self._have_all_failed, self._table, _TICKETS_S)
            if self._store.ends_here:
                self._gathering.wait_for_readers(len(self._keys), OWNER_STAYS_S)
        except StoreLostError as error:
            return (
                f"It is not known where the other ranks were: the store that they post to is gone ({error}). It ends"
                " with the process that made it, which is rank 0's unless torchrun started the ranks"
            )
        if table is None:
            return "It is not known where the other ranks were: the rank that reads the posts for all has not done so"
        return table

    def _have_all_failed(self, found: Mapping[str, str]) -> bool:
        return len(found) == len(self._keys) and all(RankStatus.from_text(value).failed for value in found.values())

    def _table(self, found: Mapping[str, str]) -> str:
        heard = {self._keys[key]: RankStatus.from_text(value) for key, value in found.items()}
        return format_rank_statuses({rank: heard.get(rank) for rank in self._keys.values()}, time.time())

    def _post_from_budget(self, now: float) -> None:
        if self._store.lost is not None:
            self._next_post_at = math.inf
            return
        charge_s = max(self._post_s, self._least_charge_s)
        saved_s = self._budget_s + (now - self._budget_at) * _SHARE_OF_TIME
        self._budget_s = min(saved_s, _MOST_POSTS_SAVED * charge_s) - charge_s
        self._post(self.now)
        self._budget_at = time.perf_counter()
        self._post_s += 0.1 * (self._budget_at - now - self._post_s)
        missing_s = max(self._post_s, self._least_charge_s) - self._budget_s
        self._next_post_at = self._budget_at + max(0.0, missing_s) / _SHARE_OF_TIME

    def _post(self, rank_status: RankStatus) -> None:
        self._store.post(self._own_key, rank_status.to_text())


def format_rank_statuses(statuses: Mapping[int, RankStatus | None], now: float) -> str:
    """A table with a line for each place where ranks stood; None for a rank that was never heard of."""
    ranks_at: dict[str, list[int]] = {}
    ages_s: dict[str, list[float]] = {}
    for rank, rank_status in statuses.items():
        at = "never posted" if rank_status is None else rank_status.at
        ranks_at.setdefault(at, []).append(rank)
        if rank_status is not None:
            # The clocks of two machines may differ by a little.
            ages_s.setdefault(at, []).append(max(0.0, now - rank_status.since))
    lines = [
        ("ranks", "since", "where"),
        *((format_ranks(ranks_at[at]), _format_ages(ages_s.get(at)), at) for at in ranks_at),
    ]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    table = [f"  {ranks:<{widths[0]}}  {since:<{widths[1]}}  {where}" for ranks, since, where in lines]
    return "\n".join(["Where each rank was when it last posted, and for how long it had been there:", *table])


def _format_ages(ages_s: list[float] | None) -> str:
    if ages_s is None:
        return ""
    shortest, longest = f"{min(ages_s):.1f}", f"{max(ages_s):.1f}"
    return f"{shortest} s" if shortest == longest else f"{shortest} to {longest} s"
