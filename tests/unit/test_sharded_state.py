"""The table by which the state of a bucket of a sharded optimizer changes, and its copy in the documentation."""

from __future__ import annotations

import itertools
from pathlib import Path

from ddp_compile.runtime.sharded.state import TABLE, Event, State

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sharded_optimizer.md"


def test_every_state_is_reached_from_whole_parameters_and_leads_back() -> None:
    for start in State:
        seen = [start]
        for _ in State:
            (following,) = {after for (before, _), after in TABLE.items() if before is seen[-1]}
            seen.append(following)
        assert set(seen) == set(State) and seen[-1] is start


def test_the_documentation_has_the_table() -> None:
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    documented = {(row[0], event): row[place] for row in rows for place, event in enumerate(Event, 1) if _is_state(row)}
    for state, event in itertools.product(State, Event):
        after = TABLE.get((state, event))
        assert documented[state.name, event].startswith(after.name if after is not None else ("waits", "refused", "-"))


def _is_state(row: list[str]) -> bool:
    return bool(row) and row[0] in State.__members__
