"""The class of a replicated module: the user's class, with the methods of `ReplicatedModule` before its own."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_compile.algorithms import AlgorithmConfig
from ddp_compile.compile.settings import CompileSettings
from ddp_compile.config import ReplicateConfig
from ddp_compile.errors import this_rank, warning_level
from ddp_compile.module.mixin import STATE, ReplicatedModule, state_of
from ddp_compile.module.replicate_state import ReplicateState
from ddp_compile.validation.wrappers import adapters_after_replication

log = logging.getLogger(__name__)

#: Methods that are also functions of the package; a module keeps its own of the same name.
ALSO_FUNCTIONS = ("no_sync", "explain", "unwrap")

#: Attributes of DistributedDataParallel that other code reads from a model.
_ATTRIBUTES: Mapping[str, Callable[[ReplicateState], Any]] = {
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


def replicate(
    module: nn.Module,
    process_group: dist.ProcessGroup,
    config: ReplicateConfig,
    algorithm: AlgorithmConfig,
    compile_settings: CompileSettings,
) -> None:
    """Swap the module's class for one with our methods and give it its state."""
    original: Any = type(module)
    kept = tuple(name for name in ALSO_FUNCTIONS if defines(module, name))
    replicated = _replicated_class(original, kept)
    module.__dict__[STATE] = ReplicateState(module, process_group, config, algorithm, compile_settings)
    module.__class__ = replicated
    for name in kept:
        log.log(
            warning_level(process_group),
            f"{this_rank()}: model.{name} remains the attribute of {original.__name__}; for that of ddp_compile, call"
            f" the function: from ddp_compile import {name}",
        )


def names_taken() -> list[str]:
    """The names that a module to be replicated must not define."""
    ours = (name for name in vars(ReplicatedModule) if not name.startswith("_") and name not in vars(nn.Module))
    return [name for name in ours if name not in ALSO_FUNCTIONS]


def defines(module: nn.Module, name: str) -> bool:
    """Whether the module defines the name; a catch-all ``__getattr__`` does not count."""
    if name in module._modules or name in module._parameters or name in module._buffers:
        return True
    return inspect.getattr_static(module, name, None) is not None


@functools.cache
def _replicated_class(original: Any, kept: tuple[str, ...]) -> type[nn.Module]:
    attributes = {name: OwnAttribute(name, original, _read_by(read)) for name, read in _ATTRIBUTES.items()}
    added = {**attributes, _AdapterConfigs.NAME: _AdapterConfigs()}
    # Libraries read the first three from the class, and look up modules by them.
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_ddp_compile_original": original,
        # Here instead of where they are defined: torch.compiler.disable imports Dynamo, which takes seconds.
        "__call__": torch.compiler.disable(ReplicatedModule.__call__, reason="ddp_compile arms its reducer"),
        "finalize_backward": torch.compiler.disable(ReplicatedModule.finalize_backward, reason="ddp_compile waits"),
        **{name: attribute for name, attribute in added.items() if not hasattr(original, name)},
        **{name: _kept(original, name) for name in kept},
        **_generate_of(original),
    }
    return type(original.__name__, (ReplicatedModule, original), names)


class OwnAttribute:
    """An attribute of a replicated class, used unless the module has or gets one of that name.

    A ``__getattr__`` of the replicated class would also work, but each read of a parameter or submodule would call it.
    ``otherwise`` gives the value for a module that has no such attribute.
    """

    def __init__(self, name: str, original: Any, otherwise: Callable[[nn.Module], Any]) -> None:
        self._name = name
        self._original = original
        self._otherwise = otherwise

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        try:
            return self._original.__getattr__(module, self._name)  # torch's, or the user's own
        except AttributeError:
            return self._otherwise(module)


class _AdapterConfigs:
    """``peft_config``, which PEFT sets on a module after putting adapters into it; an earlier one can be deleted.

    Nothing else shows it: PEFT freezes all reduced parameters, and calls the module's ``forward`` instead of the
    module.
    """

    NAME = "peft_config"

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        if self.NAME not in module.__dict__:
            raise AttributeError(self.NAME)  # a ``__getattr__`` of the module is asked next
        return module.__dict__[self.NAME]

    def __set__(self, module: nn.Module, configs: object) -> None:
        raise adapters_after_replication()

    def __delete__(self, module: nn.Module) -> None:
        if module.__dict__.pop(self.NAME, None) is None:
            raise AttributeError(self.NAME)


def _read_by(read: Callable[[ReplicateState], Any]) -> Callable[[nn.Module], Any]:
    return lambda module: read(state_of(module))


def _kept(original: Any, name: str) -> Any:
    """The entry of the replicated class that makes the module's own attribute override ours."""
    of_the_class = inspect.getattr_static(original, name, None)
    if of_the_class is not None:
        return of_the_class
    # A submodule or an attribute of this module, which another module of the class may lack.
    ours: Callable[..., Any] = vars(ReplicatedModule)[name].__get__
    return OwnAttribute(name, original, ours)


def _generate_of(original: Any) -> dict[str, Any]:
    """The class's method ``generate``, which language models of Transformers have, marked as generation."""
    generate = inspect.getattr_static(original, "generate", None)
    if not inspect.isfunction(generate):
        return {}

    @functools.wraps(generate)
    def generate_by_forwards(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with state_of(self).setting("is_generating", True):
            return generate(self, *args, **kwargs)

    return {"generate": generate_by_forwards}
