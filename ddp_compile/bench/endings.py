"""The end of a run that fails: interrupted, refused by the machine, or with a rank that died."""

import errno
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

#: Signals that ask the process to end.
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Errors of the machine, with advice. Any other OSError is a bug, and its traceback is shown.
_REFUSALS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose folders that you may write to"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or choose other folders"),
}


class Ending(NamedTuple):
    """The last message, and the exit status."""

    message: str
    status: int


def ending_of(error: BaseException, directory: Path) -> Ending | None:
    """The message for an exception that ended a run; None for an OSError that shows a bug.

    The exception has notes if something could not be cleaned up. ``directory`` is the folder for the results.
    """
    if isinstance(error, KeyboardInterrupt):
        gone = ["all processes, namespaces and temporary files of the run are gone"]
        return Ending("; ".join(["interrupted", *(_complaints(error) or gone)]), 130)
    said = [str(error), *getattr(error, "__notes__", ())]
    if isinstance(error, OSError):
        if error.errno not in _REFUSALS:
            return None
        folders = f"results go to {directory} (--output), temporary files to {tempfile.gettempdir()} (TMPDIR)"
        said += [_REFUSALS[error.errno], folders]
    return Ending("; ".join(said), 1)


def _complaints(error: BaseException | None) -> list[str]:
    """Errors that came with an interrupt: notes of the cleanup, and earlier exceptions."""
    if error is None:
        return []
    own = [*filter(None, [str(error)]), *getattr(error, "__notes__", ())]
    return own + _complaints(error.__context__)


def check_folders(directory: Path) -> None:
    """Check, before measuring and without creating anything, that results can be written.

    Raises a ValueError if the folder for the results cannot be made or written to, or temporary files have none.
    """
    existing = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
    if not existing.is_dir():
        raise ValueError(f"--output {directory}: {existing} is a file; pass a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"--output {directory}: {existing} cannot be written to; pass another folder")
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ValueError(f"{error.strerror}; set TMPDIR to a folder that can be written to and has space") from error


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Make the first signal that asks the process to end raise KeyboardInterrupt, and ignore later ones.

    Later signals would interrupt the cleanup. Signals that were ignored before, with ``nohup`` for example, still are.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {
        number: handler
        for number in INTERRUPTS
        # None is a handler that was not installed from Python and cannot be restored.
        if (handler := signal.getsignal(number)) is not None and handler is not signal.SIG_IGN
    }
    try:
        for number in before:
            signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
