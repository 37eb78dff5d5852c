"""What all ranks have posted, read by one of them and told to the others in one text.

Note [One rank reads]
A store is one thread. Were every rank to read what every rank has posted, 4,096 of them would ask it for 17 million
values, minutes of its time. So each rank that wants to know draws a ticket. Who draws the first reads all posts, waits
for those that are still to come, and puts a summary in their place, with the number of tickets drawn before it looked:
whoever holds one of those has posted before, and takes the summary. The next ticket reads anew. Ranks that wait for a
summary look for one key, so that all of them together ask for a number of things that grows as the ranks do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from ddp_compile.runtime.desync.group_store import ANSWER_LIMIT_S, GroupStore

#: Up to so many ranks, each reads for itself if the one that was to read says nothing.
_MOST_WHO_READ_ALONE = 64

_MOST_CHARACTERS = 16_384  # every rank fetches them

Posts = dict[str, str]


class Gathering:
    """Summaries of what ranks have posted under some keys.

    Args:
        store: Where they post.
        name: Of the keys that the summaries need; the same on every rank.
        keys: What is read, one key for each rank.
    """

    def __init__(self, store: GroupStore, name: str, keys: Sequence[str]) -> None:
        self._store = store
        self._tickets, self._told, self._readers = f"{name}/tickets", f"{name}/told", f"{name}/readers"
        self._keys = keys

    def summary(
        self,
        wait_s: float,
        enough: Callable[[Posts], bool],
        summarise: Callable[[Posts], str],
        at_least_s: float = 0.0,
    ) -> str | None:
        """What one rank makes of the posts of all; to be asked for after this rank's own.

        Args:
            wait_s: How long that rank waits for posts.
            enough: Given the posts that there are by their keys, whether no more has to be waited for.
            summarise: The text, given the posts; cut off after 16,384 characters.
            at_least_s: How long it waits for further tickets, so that ranks that come one by one read a few times.

        Returns:
            The text; None where the rank that was to read has told nothing in time, and the ranks are too many for
            each to read for itself.

        Raises:
            StoreLostError: The store has not answered.
        """
        ticket = self._store.add(self._tickets, 1)
        covered, text = self._wait_for(ticket, wait_s + ANSWER_LIMIT_S)
        if covered < ticket:
            if covered != ticket - 1 and len(self._keys) > _MOST_WHO_READ_ALONE:
                return None
            text = self._gather(wait_s, at_least_s, enough, summarise)
        self._store.add(self._readers, 1)
        return text

    def wait_for_readers(self, num_ranks: int, wait_s: float) -> None:
        """Wait until so many ranks have asked for a summary, and all who have asked have one.

        Args:
            num_ranks: How many, of all summaries that there have been.
            wait_s: How long at most.

        Raises:
            StoreLostError: The store has not answered.
        """
        for _ in pauses(wait_s):
            num_tickets = self._store.add(self._tickets, 0)
            if num_tickets >= num_ranks and self._store.add(self._readers, 0) >= num_tickets:
                return

    def _wait_for(self, ticket: int, wait_s: float) -> tuple[int, str]:
        """The latest summary and its number of tickets, once it is for this ticket or this one comes next."""
        covered, text = 0, ""
        for _ in pauses(wait_s):
            told = self._store.read([self._told]).get(self._told, "0 ")
            number, text = told.split(" ", 1)
            covered = int(number)
            if covered >= ticket - 1:
                break
        return covered, text

    def _gather(
        self,
        wait_s: float,
        at_least_s: float,
        enough: Callable[[Posts], bool],
        summarise: Callable[[Posts], str],
    ) -> str:
        earliest = time.monotonic() + at_least_s
        covered, found = 0, Posts()
        for _ in pauses(wait_s):
            covered = self._store.add(self._tickets, 0)  # first: whoever has drawn one has posted before
            found = self._store.read(self._keys)
            if time.monotonic() >= earliest and enough(found):
                break
        text = summarise(found)
        if len(text) > _MOST_CHARACTERS:
            text = f"{text[:_MOST_CHARACTERS]} ..."
        self._store.post(self._told, f"{covered} {text}")
        return text


def pauses(wait_s: float, longest_s: float = 0.2) -> Iterator[None]:
    """Comes once more after each of some pauses, the last time when the seconds are over.

    Args:
        wait_s: How long all of them last together.
        longest_s: How long one of them lasts at most; they double.
    """
    end, pause_s = time.monotonic() + wait_s, 0.01
    while True:
        is_over = time.monotonic() >= end  # asked first, so that what came in time is seen
        yield
        if is_over:
            return
        time.sleep(max(0.0, min(pause_s, end - time.monotonic())))
        pause_s = min(2 * pause_s, longest_s)
