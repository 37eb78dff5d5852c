"""Which code is the user's, and the lines of it that nodes of a graph come from."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from typing import NamedTuple

import torch
from torch import fx

_OURS = os.path.dirname(os.path.dirname(__file__))
_TORCH = os.path.dirname(torch.__file__)
_PYTHON = sysconfig.get_path("stdlib")
#: The folder of installed packages, which is inside Python's own.
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
#: Code without a file: Python's importer, and what fx has generated.
_NO_FILE = ("<frozen ", "<eval_with_key>")


class UserLine(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    code: str  #: its text without indentation; empty if the file cannot be read


def user_line_of(node: fx.Node) -> UserLine | None:
    """The innermost line of the user's code that a node comes from, by the stack that Dynamo recorded."""
    frames = re.findall(r'^ *File "(.+)", line (\d+), in ', node.stack_trace or "", re.MULTILINE)
    for file, line in reversed(frames):
        if is_of_users(file):
            return user_line(file, int(line))
    return None


def user_line(file: str, line: int) -> UserLine:
    """A line with its code."""
    return UserLine(file, line, linecache.getline(file, line).strip())


def is_of_users(filename: str) -> bool:
    """Whether code is neither torch's, nor ours, nor Python's own; that of installed packages is the user's."""
    if filename.startswith(_NO_FILE) or _is_in(filename, _OURS) or _is_in(filename, _TORCH):
        return False
    return any(_is_in(filename, folder) for folder in _INSTALLED) or not _is_in(filename, _PYTHON)


def _is_in(filename: str, folder: str) -> bool:
    return filename.startswith(folder + os.sep)
