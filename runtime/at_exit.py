"""What a process does before it ends, for ranks that have yet to fetch something from it."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

#: How long a process that is done waits for each of them.
LONGEST_AT_EXIT = timedelta(seconds=10)


def call_at_exit(finish: Callable[[], None]) -> None:
    """Call a bound method when the process ends, unless its object is gone by then.

    Args:
        finish: Waits for other ranks, each time `LONGEST_AT_EXIT` at most; a RuntimeError says that they are gone.
    """
    method = weakref.WeakMethod(finish)

    def run() -> None:
        if (alive := method()) is not None:
            with suppress(RuntimeError):  # and so is whoever wanted to know
                alive()

    atexit.register(run)
