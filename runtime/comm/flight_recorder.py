"""Buckets by name in what torch's flight recorder dumps.

Note [Frames that name buckets]
For each collective the recorder keeps the operation, the sizes and the Python stack; the caller can add nothing else.
So the collectives of a bucket are started by a function whose name, in that stack, is the bucket's.

The recorder keeps a stack's code objects until other collectives have taken the place of its entry. It gives them up at
the collective after that, with a lock of its own held (``PythonTraceback::gather`` of torch 2.13,
csrc/profiler/python/combined_traceback.cpp). If a code object dies there, callbacks of weak references to it run inside
the lock, and Dynamo makes such references. Every stack that is recorded or freed needs the lock. So if a callback lets
another thread run, or frees a stack, as the garbage collector may, the process hangs. These functions therefore live as
long as the process, and the recorder never has the last reference. Each takes 0.6 kB, once for each bucket of each
distinct plan.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@functools.cache  # for good, see Note [Frames that name buckets]
def caller(name: str) -> Callable[..., Any]:
    """A function ``caller(name)(function, *arguments)`` that calls ``function`` from a frame of this name."""
    return FunctionType(_call.__code__.replace(co_name=name, co_qualname=name), {}, name)
