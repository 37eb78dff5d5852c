"""Runs functions of files with slow imports on ranks of a pool, in the environment of a launcher."""

import contextlib
import importlib
import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def call(function: str, *args: Any, compiled: bool = False, **kwargs: Any) -> Any:
    """The result of ``module.function``, uncompiled unless requested. The pool's ranks are restored afterward.

    Accelerate and Trainer read their rank from the environment, and write to it.
    """
    before = dict(os.environ)
    # An address is asked for, and not used: there is a process group.
    os.environ.update(LOCAL_RANK=os.environ["RANK"], MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    module, name = function.split(".")
    stance = contextlib.nullcontext() if compiled else torch.compiler.set_stance("force_eager")
    try:
        with stance:
            return getattr(importlib.import_module(module), name)(*args, **kwargs)
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_example(name: str, *arguments: str) -> str:
    """What an example prints on this rank; the process group that it would end is the pool's."""
    printed = io.StringIO()
    with (
        patch.object(sys, "argv", [name, *arguments]),
        patch("torch.distributed.destroy_process_group"),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def error_of(case: Callable[[], Any]) -> str:
    """``Type: message``; empty if there is none."""
    before = dict(os.environ)
    try:
        case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.update(before)
    return ""


def assert_refused(cases: Iterable[tuple[Callable[[], Any], str]]) -> None:
    """Each call raises an error, in which a regular expression is found."""
    errors = [(expected, error_of(case)) for case, expected in cases]
    wrong = [(expected, error) for expected, error in errors if not re.search(expected, error, re.DOTALL)]
    assert wrong == []
