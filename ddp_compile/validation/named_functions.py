"""A user's ``module:function`` on the command line."""

import importlib
import sys
from collections.abc import Callable, Collection
from pathlib import PurePath
from typing import Any

from ddp_compile.errors import with_article


def load_function(setting: str, name: str, known: Collection[str]) -> Callable[..., Any]:
    """The function ``module:function``, found in the working directory too; raises a ValueError if there is none."""
    module_name, colon, function_name = name.partition(":")
    if not colon:
        one_of = f"one of {', '.join(known)}, or " if known else ""
        raise ValueError(f"{setting} {name!r} is not known; pass {one_of}your own module:function")
    if module_name.endswith(".py") or "/" in module_name:
        dotted = ".".join(PurePath(module_name).with_suffix("").parts)
        raise ValueError(
            f"{setting} {name!r} has a path before the colon; pass {dotted}:{function_name}, the module's name as in an"
            " import"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{setting} {name!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"{setting} {name!r} is {with_article(type(function).__name__)}; name a function")
    return function
