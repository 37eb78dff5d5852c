"""What is done before an object is gone, or its process, for ranks that have yet to fetch something from it."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

#: How long whoever is done waits for each of them.
LONGEST_AT_END = timedelta(seconds=10)


def call_at_end(owner: object, finish: Callable[[], None]) -> None:
    """Call something once, when ``owner`` is collected, or when the process ends, if that comes first.

    Args:
        owner: Whose messages may be under way.
        finish: Waits for other ranks, each time `LONGEST_AT_END` at most; a RuntimeError says that they are gone. It
            must not refer to ``owner``, which would live as long as the process.
    """

    def run() -> None:
        with suppress(RuntimeError):  # and so is whoever wanted to know
            finish()

    finalizer = weakref.finalize(owner, run)
    # Where the process ends, in the order of `atexit`: before what was there when ``owner`` came.
    finalizer.atexit = False
    atexit.register(finalizer)
