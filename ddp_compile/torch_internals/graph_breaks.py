"""Graph breaks: the code that Dynamo left to Python, and the reasons; and which code is the user's.

Note [Calls that Dynamo leaves to Python]
Dynamo inlines a module's call into the frame that it traces. If it cannot, because of a graph break in the module's own
code, Python makes the call, and Dynamo starts again with the frames inside. It leaves a frame to Python permanently if
the break is in a loop, or if it cannot resume for another reason.

Functions made here behave differently depending on whether Dynamo traces them or Python calls them. Dynamo never starts
at the frame of such a function, because its code is marked as skipped.
"""

import linecache
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from ddp_compile.torch_internals.autograd import never_compile


class GraphBreak(NamedTuple):
    reason: str  #: Dynamo's reason, in one line
    place: "SourceLine"  #: of the innermost code that is neither torch's nor Python's own


class GraphBreaks:
    """Whether Dynamo left the code of one module to Python, and the graph break that made it do so."""

    def __init__(self) -> None:
        self._is_noted = False
        self.first: GraphBreak | None = None  #: None if Dynamo has not said why

    def __bool__(self) -> bool:
        return self._is_noted

    def note_module(self) -> bool:
        """Python is about to run the module's own code, after a graph break; returns whether this is the first time."""
        if self._is_noted:
            return False
        self._is_noted, self.first = True, _last_graph_break()
        return True


def tell_when_broken(call: Callable[..., Any], is_broken: Callable[[torch.nn.Module], None]) -> Callable[..., Any]:
    """A function for ``call(module, *args, **kwargs)``; if Python calls it, ``is_broken(module)`` runs first."""
    never_compile(is_broken)

    def call_inside(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            is_broken(module)
        return call(module, *args, **kwargs)

    return _never_first(call_inside)


def in_python(traced: Callable[..., Any], called: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs ``traced`` if Dynamo traces it, and ``called`` if Python calls it."""
    never_compile(called)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return traced(*args, **kwargs)
        return called(*args, **kwargs)

    return _never_first(call)


def leave_call_to_python(cls: type[torch.nn.Module]) -> None:
    """Make Python call modules whose class defines a ``__call__``, unless Dynamo inlines the call.

    Then a ``__call__`` that puts a checkpoint around ``super().__call__()``, for example, reaches the module's compiled
    code. The mark is on the code object, so in other compiled models a graph also begins inside, as with nn.Module's
    own call.
    """
    code = getattr(cls.__call__, "__code__", None)
    if cls.__call__ is not torch.nn.Module.__call__ and code is not None and code.co_name == "__call__":
        _never_first(cls.__call__)


def _never_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo from starting at a function's frame, but not at the functions that it calls."""
    import torch._dynamo

    torch._dynamo.eval_frame.skip_code(function.__code__)
    return function


def _last_graph_break() -> GraphBreak | None:
    """The last break after which Dynamo resumed; that of the running frame if it has just been compiled."""
    from torch._dynamo.utils import graph_break_reasons

    if not graph_break_reasons:
        return None
    latest = graph_break_reasons[-1]
    frames = [(frame.filename, frame.lineno or 0) for frame in latest.user_stack]
    filename, line = [*frames[-1:], *(frame for frame in frames if is_of_users(frame[0]))][-1]
    return GraphBreak(_in_one_line(latest.reason), user_line(filename, line))


def _in_one_line(reason: str) -> str:
    """Dynamo's name of the break and its explanation, without hints, and without addresses, which differ each time."""
    reason = re.sub(r" at 0x[0-9a-f]+", "", reason)
    lines = [line.strip().removeprefix("Explanation: ") for line in reason.strip().splitlines()[:2]]
    return ": ".join(line for line in lines if line).rstrip(".")


_OURS = os.path.dirname(os.path.dirname(__file__))
_TORCH = os.path.dirname(torch.__file__)
_PYTHON = sysconfig.get_path("stdlib")
#: The folder of installed packages, which is inside Python's own.
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
#: Code without a file: Python's importer, and what fx has generated.
_NO_FILE = ("<frozen ", "<eval_with_key>")


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's code.

    Args:
        file: Path of the file.
        line: Number of the line, from 1 on.
        code: Text of the line without indentation; empty if the file cannot be read.
    """

    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def user_line_of(node: fx.Node) -> SourceLine | None:
    """The innermost line of the user's code that a node comes from, by the stack that Dynamo recorded."""
    frames = re.findall(r'^ *File "(.+)", line (\d+), in ', node.stack_trace or "", re.MULTILINE)
    for file, line in reversed(frames):
        if is_of_users(file):
            return user_line(file, int(line))
    return None


def modules_of(node: fx.Node) -> Iterator[int]:
    """The ids of the modules in whose calls Dynamo met a node, the innermost first."""
    for key in reversed(node.meta.get("nn_module_stack", {})):
        module, _, _ = key.partition("@")  # what follows counts the calls
        if module.isdecimal():  # not with torch._dynamo.config.inline_inbuilt_nn_modules=False
            yield int(module)


def user_line(file: str, line: int) -> SourceLine:
    """A line with its code."""
    return SourceLine(file, line, linecache.getline(file, line).strip())


def is_of_users(filename: str) -> bool:
    """Whether code is neither torch's, nor ours, nor Python's own; that of installed packages is the user's."""
    if filename.startswith(_NO_FILE) or _is_in(filename, _OURS) or _is_in(filename, _TORCH):
        return False
    return any(_is_in(filename, folder) for folder in _INSTALLED) or not _is_in(filename, _PYTHON)


def _is_in(filename: str, folder: str) -> bool:
    return filename.startswith(folder + os.sep)
