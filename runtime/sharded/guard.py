"""Lets reads of parameters wait while the other ranks' shards of them are on their way.

Note [Guarded parameters]
Between a step and the next forward, users read parameters that they took from the model earlier. An average of weights
over such a list would silently be stale. So until parameters are complete, each one has a subclass of its own class,
whose ``__torch_function__`` waits. It stays the same object, and gets its class back once all are complete, so that no
forward of the module meets the other class. Code that reads memory without asking the class is not noticed:
docs/sharded_optimizer.md lists it.
"""

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals

_GUARD = "_ddp_compile_guard"  # attribute of an incomplete parameter

# Attributes that ``zero_grad`` and the start of a forward read, and that do not depend on the values.
# fmt: off
_METADATA = frozenset((
    "_backward_hooks", "_grad", "_post_accumulate_grad_hooks", "_version", "device", "dtype", "grad", "grad_fn",
    "is_leaf", "layout", "requires_grad", "shape",
))
# fmt: on


class ParameterGuard:
    """Calls ``complete``, on any thread, when one of some parameters is about to be read."""

    def __init__(self, parameters: Sequence[Parameter], complete: Callable[[], None]) -> None:
        self._parameters = list(parameters)
        self._complete = complete
        self._lock = threading.RLock()
        self._is_up = False

    def raise_up(self) -> None:
        """From now on, reading waits."""
        with self._lock:
            if not self._is_up:
                for parameter in self._parameters:
                    vars(parameter)[_GUARD] = self
                    parameter.__class__ = _guarded_class(type(parameter))
                self._is_up = True

    def take_down(self) -> None:
        """The parameters are complete, or will be before compiled code reads them."""
        with self._lock:
            if self._is_up:
                self._is_up = False
                for parameter in self._parameters:
                    parameter.__class__ = type(parameter).__mro__[1]
                    vars(parameter).pop(_GUARD, None)

    def complete(self) -> None:
        """Wait, and take the guard down."""
        with self._lock:  # a second thread that reads waits as well
            if self._is_up:
                self._complete()
                self.take_down()


@functools.cache
def _guarded_class(cls: type[Parameter]) -> type[Parameter]:
    theirs: Any = cls.__torch_function__  # a user's class may have its own

    def intercept(_cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(getattr(func, "__self__", None), "__name__", "") not in _METADATA:
            _complete(args, kwargs)
        if theirs is not torch_internals.NO_TORCH_FUNCTION:
            return theirs(func, types, args, kwargs or {})
        with torch_internals.as_plain_tensors():
            return func(*args, **(kwargs or {}))

    # These look at the class before they read.
    def copy_complete(self: Parameter, memo: dict[int, Any]) -> Any:
        _complete(self)
        return copy.deepcopy(self, memo)

    def as_subclass_complete(self: Parameter, other: type[Tensor]) -> Tensor:
        _complete(self)
        return self.as_subclass(other)

    torch_internals.never_compile(intercept)  # a training step that is compiled as a whole may read
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    methods = {"__deepcopy__": copy_complete, "as_subclass": as_subclass_complete}
    return type(cls.__name__, (cls,), {**names, **methods, "__torch_function__": classmethod(intercept)})


def _complete(*values: Any) -> None:
    """Wait for the parameters among some values, which may be in lists and dicts."""
    for value in values:
        if isinstance(value, list | tuple | set):
            _complete(*value)
        elif isinstance(value, dict):
            _complete(*value.values())
        elif isinstance(value, Parameter) and (guard := vars(value).get(_GUARD)) is not None:
            guard.complete()
