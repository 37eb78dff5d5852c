"""The class of a replicated module: the user's, with the methods of `ReplicatedModule` in front of its own."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_compile.algorithms import AlgorithmConfig
from ddp_compile.compile.settings import CompileSettings
from ddp_compile.config import ReplicateConfig
from ddp_compile.module.ddp_attributes import OwnAttribute, attributes_for
from ddp_compile.module.mixin import STATE, ReplicatedModule, state_of
from ddp_compile.module.replicate_state import ReplicateState

log = logging.getLogger(__name__)

#: Methods that are functions of the package as well, so that a module keeps its own of the same name.
ALSO_FUNCTIONS = ("no_sync", "explain", "unwrap")


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
        log.warning(
            "rank %d: model.%s stays what %s has under that name; write ddp_compile.%s(model) for that of ddp_compile",
            process_group.rank(),
            name,
            original.__name__,
            name,
        )


def names_taken() -> list[str]:
    """The names that a module to be replicated must not have itself."""
    ours = (name for name in vars(ReplicatedModule) if not name.startswith("_") and name not in vars(nn.Module))
    return [name for name in ours if name not in ALSO_FUNCTIONS]


def defines(module: nn.Module, name: str) -> bool:
    """Whether the module has the name itself; a catch-all ``__getattr__`` does not count."""
    if name in module._modules or name in module._parameters or name in module._buffers:
        return True
    return inspect.getattr_static(module, name, None) is not None


@functools.cache
def _replicated_class(original: Any, kept: tuple[str, ...]) -> type[nn.Module]:
    # Libraries read these names off the class, and look modules up by them.
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_ddp_compile_original": original,
        # Not where they are defined: torch.compiler.disable imports Dynamo, which takes seconds.
        "__call__": torch.compiler.disable(ReplicatedModule.__call__, reason="ddp_compile arms its reducer"),
        "finalize_backward": torch.compiler.disable(ReplicatedModule.finalize_backward, reason="ddp_compile waits"),
        **attributes_for(original, state_of),
        **{name: _kept(original, name) for name in kept},
        **_generate_of(original),
    }
    return type(original.__name__, (ReplicatedModule, original), names)


def _kept(original: Any, name: str) -> Any:
    """What stands in the replicated class so that the module's own goes before ours."""
    of_the_class = inspect.getattr_static(original, name, None)
    if of_the_class is not None:
        return of_the_class
    # A submodule or an attribute of this one; another module of the class may have none.
    ours: Callable[..., Any] = vars(ReplicatedModule)[name].__get__
    return OwnAttribute(name, original, ours)


def _generate_of(original: Any) -> dict[str, Any]:
    """The class's method ``generate``, as Transformers' language models have it, told from other evaluation."""
    generate = inspect.getattr_static(original, "generate", None)
    if not inspect.isfunction(generate):
        return {}

    @functools.wraps(generate)
    def generate_by_forwards(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with state_of(self).generating():
            return generate(self, *args, **kwargs)

    return {"generate": generate_by_forwards}
