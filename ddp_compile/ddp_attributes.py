"""Attributes of DistributedDataParallel that code reads off a model, ``model.process_group`` for example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ddp_compile.replicate_state import ReplicateState

_READ: Mapping[str, Callable[[ReplicateState], Any]] = {
    "process_group": lambda state: state.process_group,
    "device_mesh": lambda state: state.config.device_mesh,
    "device": lambda state: state.device,
    "device_type": lambda state: state.device.type,
    "parameters_to_ignore": lambda state: {*state.config.parameters_to_ignore, *state.config.delayed.named},
    "bucket_bytes_cap": lambda state: state.config.caps_bytes[-1],
    "bucket_bytes_cap_list": lambda state: list(state.config.caps_bytes),
    "gradient_as_bucket_view": lambda state: state.config.gradient_as_bucket_view,
    "lazy_bucket_allocation": lambda state: state.config.lazy_bucket_allocation,
    "find_unused_parameters": lambda state: state.config.find_unused_parameters,
    "skip_all_reduce_unused_params": lambda state: state.config.skip_all_reduce_unused_params,
    "static_graph": lambda state: state.config.static_graph,
}


class _Attribute:
    """One attribute of a replicated module; what the module has under that name itself, or is given, goes before.

    Not a ``__getattr__`` of the replicated class, which each look at a parameter or submodule would pass through.

    Args:
        name: Its name.
        original: The user's class.
        state_of: Finds what a replicated module carries.
    """

    def __init__(self, name: str, original: Any, state_of: Callable[[nn.Module], ReplicateState]) -> None:
        self._name = name
        self._original = original
        self._state_of = state_of

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        try:
            return self._original.__getattr__(module, self._name)  # parameters, submodules, what a user's own one finds
        except AttributeError:
            return _READ[self._name](self._state_of(module))


def attributes_for(original: type, state_of: Callable[[nn.Module], ReplicateState]) -> dict[str, Any]:
    """What a replicated class gets of them: those that the user's class does not have itself.

    Args:
        original: The user's class.
        state_of: Finds what a replicated module carries.
    """
    return {name: _Attribute(name, original, state_of) for name in _READ if not hasattr(original, name)}
