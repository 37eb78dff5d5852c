"""Parameters whose values are still on their way: whoever reads one waits for them.

Note [Guarded parameters]
Between ``optimizer.step()`` and the next forward, parameters are being gathered. Users read them there: averages of
weights, ``state_dict()``, a norm that is logged. So until they are complete, each parameter has a subclass of its own
class, whose ``__torch_function__`` waits before it lets anything but a question about shape or dtype through. It is the
same object before and after, and so is its class once all are complete: compiled code, which is guarded by the classes
of its parameters, never meets the other one. What reads without asking the class is told of where it begins, see
Note [Hidden readers], and before a fork everything is waited for: the threads that receive are not in the child. What
else reads memory without torch's Python interface is not seen, docs/sharded_optimizer.md lists it.
"""

from __future__ import annotations

import copy
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals

# Name of the attribute in which an incomplete parameter has its guard.
_GUARD = "_ddp_compile_guard"

# What can be asked about a parameter without its values.
_ATTRIBUTES = frozenset(
    {
        "_backward_hooks",
        "_grad",
        "_post_accumulate_grad_hooks",
        "_version",
        "device",
        "dtype",
        "grad",
        "grad_dtype",
        "grad_fn",
        "is_cpu",
        "is_cuda",
        "is_leaf",
        "is_meta",
        "is_mkldnn",
        "is_nested",
        "is_quantized",
        "is_sparse",
        "is_sparse_csr",
        "itemsize",
        "layout",
        "name",
        "names",
        "nbytes",
        "ndim",
        "output_nr",
        "requires_grad",
        "retains_grad",
        "shape",
    }
)
_FUNCTIONS = frozenset(
    {
        "__hash__",
        "__len__",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "nelement",
        "numel",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "size",
        "stride",
    }
)


_guards: list[weakref.ref[ParameterGuard]] = []  # without a lock, that a fork could find taken


class ParameterGuard:
    """Calls back when one of some parameters is about to be read.

    Args:
        parameters: The parameters.
        complete: Returns when they are complete; may be called by any thread.
        is_lost: Whether they never will be, and ``complete`` raises.
    """

    def __init__(
        self, parameters: Sequence[Parameter], complete: Callable[[], None], is_lost: Callable[[], bool]
    ) -> None:
        self._parameters = list(parameters)
        self._complete = complete
        self.is_lost = is_lost
        self._lock = threading.RLock()
        self._is_up = False
        torch_internals.watch_hidden_readers(_complete_guarded, _complete)
        _complete_before_forks()
        _guards.append(weakref.ref(self, _guards.remove))

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
        """Wait, and let the parameters be what they were."""
        with self._lock:  # another thread that comes meanwhile waits as well
            if self._is_up:
                self._complete()
                self.take_down()

    def complete_unguarded(self) -> None:
        """`complete`, also where the guard was taken down for a forward that is under way in another thread."""
        with self._lock:
            self._complete()
            self.take_down()


def _working_guards() -> list[ParameterGuard]:
    # Who reads a lost one is told there. Nobody can say whether hidden readers do: another model, made in the same
    # process, would be refused for this one.
    return [guard for each in list(_guards) if (guard := each()) is not None and not guard.is_lost()]


def _complete_guarded() -> None:
    """Somebody is about to read who does not ask the class."""
    for guard in _working_guards():
        guard.complete()


def _complete_unguarded() -> None:
    for guard in _working_guards():
        guard.complete_unguarded()


@functools.cache  # there is no way to take it back
def _complete_before_forks() -> None:
    """Wait before ``os.fork``, since in the child a gather would never end; what fails there fails in the child too."""
    os.register_at_fork(before=_complete_unguarded)


@functools.cache
def _guarded_class(cls: type[Parameter]) -> type[Parameter]:
    theirs: Any = cls.__torch_function__  # of a class of the user's, maybe

    def intercept(_cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _asks_for_metadata(func):
            _complete(args, kwargs)
        if theirs is not torch_internals.NO_TORCH_FUNCTION:
            return theirs(func, types, args, kwargs or {})
        with torch_internals.as_plain_tensors():
            return func(*args, **(kwargs or {}))

    def copy_complete(self: Parameter, memo: dict[int, Any]) -> Any:
        _complete(self)  # before anybody asks for the class
        return copy.deepcopy(self, memo)

    def as_subclass_complete(self: Parameter, other: type[Tensor]) -> Tensor:
        _complete(self)  # torch does not ask the class
        return self.as_subclass(other)

    torch_internals.never_compile(intercept)  # reads may come in a training step that is compiled as a whole
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


def _asks_for_metadata(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", "") in _ATTRIBUTES
    return name in _FUNCTIONS
