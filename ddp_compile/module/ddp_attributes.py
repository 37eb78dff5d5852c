"""Attributes that other code looks for on a model: those of DistributedDataParallel, and one that PEFT sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import nn

from ddp_compile.module.replicate_state import ReplicateState
from ddp_compile.validation.wrappers import adapters_behind_replication

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


class OwnAttribute:
    """An attribute of a replicated class; what the module has under that name itself, or is given, goes before.

    Not a ``__getattr__`` of the replicated class, which each look at a parameter or submodule would pass through.

    Args:
        name: Its name.
        original: The user's class.
        otherwise: What it is for a module that has none itself.
    """

    def __init__(self, name: str, original: Any, otherwise: Callable[[nn.Module], Any]) -> None:
        self._name = name
        self._original = original
        self._otherwise = otherwise

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        try:
            return self._original.__getattr__(module, self._name)  # parameters, submodules, what a user's own one finds
        except AttributeError:
            return self._otherwise(module)


class _AdapterConfigs:
    """``peft_config``, which PEFT sets on a module when it has put adapters into it; those of before can be deleted.

    Nothing else tells: PEFT freezes what is reduced, and calls the module's ``forward`` instead of the module.

    Args:
        state_of: Finds what a replicated module carries.
    """

    _NAME = "peft_config"

    def __init__(self, state_of: Callable[[nn.Module], ReplicateState]) -> None:
        self._state_of = state_of

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        if self._NAME not in module.__dict__:
            raise AttributeError(self._NAME)  # a ``__getattr__`` of the module's own comes next
        return module.__dict__[self._NAME]

    def __set__(self, module: nn.Module, configs: object) -> None:
        raise adapters_behind_replication(self._state_of(module).process_group.rank())

    def __delete__(self, module: nn.Module) -> None:
        if module.__dict__.pop(self._NAME, None) is None:
            raise AttributeError(self._NAME)


def attributes_for(original: type, state_of: Callable[[nn.Module], ReplicateState]) -> dict[str, Any]:
    """What a replicated class gets of them: those that the user's class does not have itself.

    Args:
        original: The user's class.
        state_of: Finds what a replicated module carries.
    """
    read = {name: OwnAttribute(name, original, _of_state(read, state_of)) for name, read in _READ.items()}
    attributes = {**read, _AdapterConfigs._NAME: _AdapterConfigs(state_of)}
    return {name: attribute for name, attribute in attributes.items() if not hasattr(original, name)}


def _of_state(
    read: Callable[[ReplicateState], Any], state_of: Callable[[nn.Module], ReplicateState]
) -> Callable[[nn.Module], Any]:
    return lambda module: read(state_of(module))


def bound_to(other: nn.Module, module: nn.Module, value: Any) -> Any:
    """An attribute of a module for another one: methods bound to it, as Accelerate wraps ``forward``, are the other's.

    Left as they are, they would lead a copy of the other back to the module.
    """
    is_bound = isinstance(value, MethodType) and value.__self__ is module
    return MethodType(value.__func__, other) if is_bound else value
