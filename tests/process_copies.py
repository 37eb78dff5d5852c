"""Processes that are copies of one that has imported torch and its compilers, which takes seconds.

For tests that need a separate process, but not one that starts before torch is imported. Nothing here imports the code
under test.
"""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

from one_stack import on_one_stack

# What every rank imports sooner or later. Nothing of ours: the process that imports it does not have pytest's path, and
# could find an installed copy instead of the code under test. None of it starts a thread, which a fork would lose. The
# last one compiles.
PRELOADED = [
    "pytest",
    "torch.distributed",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.optim",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "warm_compilers",
]


def context_of_copies() -> ForkServerContext:
    """The context of processes that are copies of one process with its own hash seed. Call it before the first one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with _first_in_path(Path(__file__).parent):
        forkserver.ensure_running()
    return context


@contextmanager
def _first_in_path(folder: Path) -> Iterator[None]:
    """Processes that start inside look for modules in this folder first."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(folder) if path is None else f"{folder}{os.pathsep}{path}"
    try:
        yield
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path


def begin_copy(path: list[str]) -> None:
    """The first step of a copy: add ``path`` to its module search path, which the original process did not have.

    Raises:
        ImportError: A module was not preloaded, which the original process does not report.
    """
    if missing := [name for name in PRELOADED if name not in sys.modules]:
        raise ImportError(f"the process that others are copies of could not import {missing}")
    sys.path[:] = path
    # The first thread that asks recreates the inherited pool of threads. Two threads must not do that at the same time.
    sys.modules["torch"].set_num_threads(1)


class Ended(NamedTuple):
    """A process that has ended, and its output. The exit code is that of a signal if it took too long."""

    exit_code: int | None
    stdout: str
    stderr: str


def run_in_copy(
    function: Callable[..., Any], *args: Any, environment: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> Ended:
    """Call a function in a new process, with ``environment`` or that of this process.

    It ends as those of `multiprocessing` do: with the code 1 and a traceback if the function raises, and without the
    end of the interpreter.
    """
    with tempfile.TemporaryDirectory(prefix="copy_") as directory:
        files = [Path(directory) / name for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        args_of_copy = (files, dict(os.environ if environment is None else environment), sys.path, function, args)
        process = context_of_copies().Process(target=_serve_once, args=args_of_copy)
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
        return Ended(process.exitcode, *(file.read_text() for file in files))


def _serve_once(
    files: list[Path], environment: dict[str, str], path: list[str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    begin_copy(path)
    function(*args)


on_one_stack(_serve_once)
