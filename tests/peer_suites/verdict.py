"""The verdict on a test that has ended, given the list of those that do not apply."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).with_name("not_applicable.toml")

PASSED, FAILED = "passed", "failed"
#: Why a test may be listed: it uses internals of DistributedDataParallel; it expects the words of an error that has
#: other words here; it does something that is refused here; or compiled graphs fail it under torch.compile too.
KINDS = INTERNALS, WORDS, REFUSED, COMPILED = ("internals", "words", "refused", "compiled")


@dataclass(frozen=True)
class Listed:
    """Why a test does not apply, and what it has to fail with, so that no other error is hidden by the line."""

    kind: str
    error: str
    why: str


def read_list(file: Path = LIST) -> dict[str, Listed]:
    """The tests that do not apply, by name.

    Raises:
        ValueError: A line of another kind, or without an error or a reason.
    """
    entries = {name: Listed(**entry) for name, entry in tomllib.loads(file.read_text()).items()}
    for name, entry in entries.items():
        if entry.kind not in KINDS or not entry.error or not entry.why:
            raise ValueError(f"{file.name}: {name} needs a kind, one of {KINDS}, an error and a reason; it has {entry}")
    return entries


def judge(passed: bool, error: str, listed: Listed | None, passes_eagerly: Callable[[], bool]) -> tuple[str, str]:
    """The row of the table in which a test counts, and a message about it.

    ``passes_eagerly`` is asked if the list says that compiled graphs fail the test.
    """
    if listed is None:
        return (PASSED, "") if passed else (FAILED, error)
    if passed:
        return FAILED, f"unexpectedly passes: drop its line in {LIST.name}"
    if listed.error not in error:
        return FAILED, f"{LIST.name} says that it fails with {listed.error!r}; it fails with {error}"
    if listed.kind == COMPILED and not passes_eagerly():
        return FAILED, f"{LIST.name} says that compiled graphs do so, but it fails with backend='eager' as well"
    return listed.kind, listed.why
