"""Asynchronous averages when one rank's process, or its part in them, ends: the others hear of it within seconds."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

SCRIPT = Path(__file__).with_name("ends_while_averaging.py")
ENDED = "rank 1 has come to the end of its process"
#: How rank 1 ends, what rank 0 is told of it, and how rank 1's process ends, by SIGTERM if it had to be helped.
HOW = {
    "exit": (ENDED, 1),
    "blocked": (ENDED, -15),  # another exit function takes long
    "child": (ENDED, 1),  # of multiprocessing, which skips atexit
    "leave": ("rank 1 has left the averaging after an error", -15),
}
LONG_HOW = {
    "raise": (ENDED, 1),
    "child_exit": (ENDED, 1),
    "end": (ENDED, 0),  # the last line of its script
    "let_go": ("rank 1 has let its model go", -15),
}


class Ended(NamedTuple):
    said: str
    codes: list[int]


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """By scenario, what rank 0 was told and both exit codes; all of them run at the same time."""
    selected = [
        item.callspec.params["how"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    ]
    command = [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("stores")), *selected]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = dict(line.split(": ", 1) for line in run.stdout.splitlines())
    values = {name: ast.literal_eval(text) for name, text in lines.items()}
    return {how: Ended(values[f"{how} said"], values[f"{how} codes"]) for how in selected}


@pytest.mark.parametrize("how", [*HOW, *(pytest.param(how, marks=pytest.mark.long) for how in LONG_HOW)])
def test_a_rank_that_ends_is_known_by_name_within_seconds(how: str, ended: dict[str, Ended]) -> None:
    told, exit_code = (HOW | LONG_HOW)[how]
    assert f"has ended, because {told} without model.comm_algorithm.abort()" in ended[how].said
    assert ended[how].codes == [0, exit_code]
