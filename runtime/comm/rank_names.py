"""Ranks in the text of errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


def format_ranks(ranks: Iterable[int]) -> str:
    """Ascending ranks in few characters: "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def name_values(values: Sequence[object]) -> str:
    """Which ranks have which value, the fewest ranks first: "1 on rank 2, 0 on ranks 0-1, 3".

    Args:
        values: By rank.
    """
    counts = Counter(values)
    ranks_of = {value: [rank for rank, theirs in enumerate(values) if theirs == value] for value in counts}
    rarest_first = sorted(counts, key=lambda value: (counts[value], ranks_of[value]))
    return ", ".join(
        f"{value} on rank{'s' if counts[value] > 1 else ''} {format_ranks(ranks_of[value])}" for value in rarest_first
    )
