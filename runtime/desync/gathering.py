"""The posts of all ranks, read by one rank and passed on to the others as one text.

Note [One rank reads]
A store has one thread. If every rank read every other rank's post, 4,096 ranks would ask it for 17 million values,
which takes minutes. So each rank that wants to read draws a ticket. The rank with the first ticket reads all posts,
waits for those that are still missing, and posts a summary with the number of tickets drawn before it read. The holders
of these tickets posted before they drew, so they take the summary. The holder of the next ticket reads again. Ranks
that wait for a summary ask for one key, so the number of questions grows only linearly with the number of ranks.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from ddp_compile.runtime.desync.group_store import ANSWER_LIMIT_S, GroupStore

#: Up to this many ranks, each reads for itself if the reader posts no summary.
_MOST_WHO_READ_ALONE = 64
#: Length of a summary, which every rank fetches.
_MOST_CHARACTERS = 16_384

Posts = dict[str, str]


class Gathering:
    """Summaries of what ranks have posted under some keys, one for each rank.

    ``name``, the same on every rank, begins the keys of the summaries. If ``once``, the first summary is that of all
    ranks, also of those whose posts it has not seen.
    """

    def __init__(self, store: GroupStore, name: str, keys: Sequence[str], once: bool = False) -> None:
        self._store, self._once = store, once
        self._tickets, self._told, self._readers = summary_keys(name)
        self._keys = keys

    def summary(
        self, wait_s: float, enough: Callable[[Posts], bool], summarize: Callable[[Posts], str], at_least_s: float = 0.0
    ) -> str | None:
        """The text that one rank makes of all posts. Call it after this rank has posted. Raises StoreLostError.

        It is None if the reader posts none in time and there are too many ranks for each to read for itself.

        Args:
            wait_s: How long that rank waits for posts.
            enough: Given the posts so far by their keys, whether that rank can stop waiting for more.
            summarize: Makes the text from the posts. It is truncated to 16,384 characters.
            at_least_s: How long it waits for more tickets, so that ranks that arrive one by one cause only a few reads.
        """
        ticket = self._store.add(self._tickets, 1)
        covered, text = self._wait_for(ticket, wait_s + ANSWER_LIMIT_S)
        if covered < ticket and not (covered and self._once):
            if covered != ticket - 1 and len(self._keys) > _MOST_WHO_READ_ALONE:
                return None
            text = self._gather(wait_s, at_least_s, enough, summarize)
        self._store.add(self._readers, 1)
        return text

    def wait_for_readers(self, num_ranks: int, wait_s: float) -> None:
        """Wait until so many ranks have asked for summaries, and have them; raises StoreLostError."""
        for _ in pauses(wait_s):
            num_tickets = self._store.add(self._tickets, 0)
            if num_tickets >= num_ranks and self._store.add(self._readers, 0) >= num_tickets:
                return

    def _wait_for(self, ticket: int, wait_s: float) -> tuple[int, str]:
        """Number of tickets and text of the latest summary, once it covers this ticket or this ticket is next."""
        covered, text = 0, ""
        for _ in pauses(wait_s):
            told = self._store.read([self._told]).get(self._told, "0 ")
            number, text = told.split(" ", 1)
            covered = int(number)
            if covered >= ticket - 1 or (covered and self._once):
                break
        return covered, text

    def _gather(
        self, wait_s: float, at_least_s: float, enough: Callable[[Posts], bool], summarize: Callable[[Posts], str]
    ) -> str:
        earliest = time.monotonic() + at_least_s
        covered, found = 0, Posts()
        for _ in pauses(wait_s):
            covered = self._store.add(self._tickets, 0)  # first, since the holder of a ticket has posted before
            found = self._store.read(self._keys)
            if time.monotonic() >= earliest and enough(found):
                break
        text = summarize(found)
        if len(text) > _MOST_CHARACTERS:
            text = f"{text[:_MOST_CHARACTERS]} ..."
        self._store.post(self._told, f"{covered} {text}")
        return text


def summary_keys(name: str) -> list[str]:
    """The keys of the summaries of this name."""
    return [f"{name}/tickets", f"{name}/told", f"{name}/readers"]


def pauses(wait_s: float, longest_s: float = 0.2) -> Iterator[None]:
    """Yield between pauses, each twice as long as the one before, and once more when the time is over."""
    end, pause_s = time.monotonic() + wait_s, 0.01
    while True:
        is_over = time.monotonic() >= end  # checked first, so that the caller sees what came in time
        yield
        if is_over:
            return
        time.sleep(max(0.0, min(pause_s, end - time.monotonic())))
        pause_s = min(2 * pause_s, longest_s)
