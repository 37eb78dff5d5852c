"""What smaller buckets would change: the measured schedule, played again with one bucket in pieces.

It knows the link only from the measured transfers, and needs no other model of it: a transfer takes a latency and a
time for each byte, and transfers follow one another.

Source: the linear cost of a message is that of Hockney, "The communication challenge for MPP", 1994.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

#: The replay of what was measured may differ from it by this share; beyond it the model does not fit.
_TOLERANCE = 0.15
_PIECES = (2, 4, 8)


class Sent(NamedTuple):
    """A measured reduction.

    Args:
        num_bytes: Of its flat buffer.
        begun: When its first gradient can have been ready at the earliest: when the bucket before it was.
        ready: When its last rank was ready.
        transfer_s: From the moment at which data could move.
    """

    num_bytes: int
    begun: float
    ready: float
    transfer_s: float


class Link(NamedTuple):
    """Time of a transfer: latency, and seconds for each byte."""

    latency_s: float
    s_per_byte: float


class Better(NamedTuple):
    """Into how many pieces a bucket would be split, and what that would hide."""

    pieces: int
    hidden_s: float


def fit_link(sent: Sequence[Sent]) -> Link | None:
    """The least squares fit to the transfers; None if they have one size, or if larger ones do not take longer."""
    sizes = [each.num_bytes for each in sent]
    if len(set(sizes)) < 2:
        return None
    times = [each.transfer_s for each in sent]
    slope, latency_s = statistics.linear_regression(sizes, times)
    if latency_s < 0:
        slope, latency_s = statistics.linear_regression(sizes, times, proportional=True)
    return Link(latency_s, slope) if slope > 0 else None


def exposed_after(sent: Sequence[Sent], link: Link, computed: float) -> float:
    """How long the last of these transfers goes on after the computation has ended.

    Args:
        sent: In launch order.
        link: What all of them share.
        computed: When the last rank had nothing left to compute.
    """
    free = float("-inf")
    for each in sent:
        free = max(free, each.ready) + link.latency_s + link.s_per_byte * each.num_bytes
    return max(0.0, free - computed)


def best_split(sent: Sequence[Sent], index: int, most: int, computed: float, exposed_s: float) -> Better | None:
    """The split of one bucket into equal pieces that hides most, if pieces become ready at an even pace.

    Args:
        sent: All reductions of a step, in launch order.
        index: Which of them would be split.
        most: No more pieces than this.
        computed: When the last rank had nothing left to compute.
        exposed_s: What was measured to be exposed, of all of them.

    Returns:
        None if no link fits the transfers, if the replay of the measured buckets does not find ``exposed_s``, or if no
        split hides anything.
    """
    link = fit_link(sent)
    if link is None:
        return None
    as_measured = exposed_after(sent, link, computed)
    if abs(as_measured - exposed_s) > _TOLERANCE * exposed_s:
        return None
    found = []
    for pieces in _PIECES:
        if pieces <= most:
            split = [*sent[:index], *_split(sent[index], pieces), *sent[index + 1 :]]
            found.append(Better(pieces, as_measured - exposed_after(split, link, computed)))
    best = max(found, key=lambda better: better.hidden_s, default=None)
    return best if best is not None and best.hidden_s > 0 else None


def _split(bucket: Sent, pieces: int) -> list[Sent]:
    apart = (bucket.ready - bucket.begun) / pieces
    return [
        bucket._replace(num_bytes=bucket.num_bytes // pieces, ready=bucket.begun + apart * (i + 1))
        for i in range(pieces)
    ]
