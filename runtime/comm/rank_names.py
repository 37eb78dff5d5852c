"""The words for ranks in messages, which always name global ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def format_ranks(ranks: Iterable[int]) -> str:
    """Ascending ranks, abbreviated: "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def on_ranks(ranks: Iterable[int]) -> str:
    """As "on rank 2", "on ranks 0-1, 3"."""
    ranks = sorted(ranks)
    return f"on rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


def name_values(values: Mapping[int, object]) -> str:
    """Which ranks have which value, the fewest ranks first: "1 on rank 2, 0 on ranks 0-1, 3".

    Args:
        values: By global rank.
    """
    ranks_of: dict[object, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    rarest_first = sorted(ranks_of.items(), key=lambda item: (len(item[1]), item[1]))
    return ", ".join(f"{value} {on_ranks(ranks)}" for value, ranks in rarest_first)
