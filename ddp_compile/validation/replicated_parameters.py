"""The reduced parameters of each replicated module: which have changed, and which two modules share."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Container

import torch
from torch import nn

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.runtime.comm import error_messages
from ddp_compile.validation.wrappers import reduces_by_itself, reducing_wrappers_inside

# Of all replicated modules.
_alive: weakref.WeakSet[ReplicatedParameters] = weakref.WeakSet()

_Properties = tuple[torch.dtype, torch.device, torch.Size]


def reduced_parameters(module: nn.Module, ignored: Container[str]) -> dict[str, nn.Parameter]:
    """The parameters that are averaged over ranks, by fully qualified name; a tied parameter has its first name."""
    every_name = module.named_parameters(remove_duplicate=False) if ignored else ()
    ignored_ids = {id(parameter) for name, parameter in every_name if name in ignored}
    return {name: p for name, p in module.named_parameters() if p.requires_grad and id(p) not in ignored_ids}


class ReplicatedParameters:
    """The parameters that one module was replicated with.

    Args:
        ignored: Names of parameters that are not reduced.
    """

    def __init__(self, module: nn.Module, ignored: Container[str]) -> None:
        self.named = reduced_parameters(module, ignored)
        self._of = type(module).__name__
        self._ignored = ignored
        self._names = {id(parameter): name for name, parameter in self.named.items()}
        self._properties = {id(parameter): _properties(parameter) for parameter in self.named.values()}
        self._wrappers = reducing_wrappers_inside(module)
        self._frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}

    def shared_with_others(self) -> list[str]:
        """The parameters that another replicated module reduces too, as in "head.weight is head.weight of a Task"."""
        if self._find_shared():
            gc.collect()  # frees modules that were dropped: their states are in cycles
        return self._find_shared()

    def refuse_shared(self) -> None:
        """Raise a ReplicationError if another replicated module reduces some of the parameters too."""
        if shared := self.shared_with_others():
            raise ReplicationError(
                f"{this_rank()}: another replicated module already reduces parameters of this module:"
                f" {', '.join(shared)}. Each would average the other's means again. Call ddp_compile once on a module"
                " that contains both, and let its forward choose; or unwrap() the other module first"
            )

    def register(self) -> None:
        """Record that the module is replicated."""
        _alive.add(self)

    def release(self) -> None:
        """Record that the module is no longer replicated."""
        _alive.discard(self)

    def refuse_changes(self, module: nn.Module) -> None:
        """Refuse parameters other than those that were replicated.

        A frozen or moved or renamed parameter is no change: a generator's step freezes the discriminator, and
        unfreezes it afterwards. If gradients are missing for that reason, `MissingGradientError` says so. Nor are
        tensors that stand in for parameters during one call: what derives them from parameters passes gradients on.
        """
        if self._is_as_it_was(module) or torch_internals.has_swapped_parameters(module):
            return
        wrappers = [wrapper for wrapper in reducing_wrappers_inside(module) if wrapper not in self._wrappers]
        changes = [*wrappers, *self._changes(module)]
        if changes:
            raise error_messages.parameters_changed(changes)

    def _is_as_it_was(self, module: nn.Module) -> bool:
        """A quick check without names: True only if nothing has changed."""
        known, missing = self._properties, set(self._properties)
        seen: set[int] = set()
        types: set[type] = set()
        to_see = [module]
        while to_see:
            owner = to_see.pop()
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            to_see.extend(child for child in owner._modules.values() if child is not None)
            for parameter in owner._parameters.values():
                if parameter is None:
                    continue
                was = known.get(id(parameter))
                if parameter.requires_grad if was is None else was != _properties(parameter):
                    return False
                missing.discard(id(parameter))
            types.add(type(owner))
        return not missing and not any(map(reduces_by_itself, types))

    def _changes(self, module: nn.Module) -> list[str]:
        now = reduced_parameters(module, self._ignored)
        present = {id(parameter): parameter for parameter in module.parameters()}
        at = dict(module.named_parameters(remove_duplicate=False))
        changes: dict[str, list[str]] = {}  # names, by what happened to them
        for number, name in self._names.items():
            if number not in present:
                other = at.get(name)
                what = "removed" if other is None else f"replaced by another {type(other).__name__}"
                changes.setdefault(what, []).append(name)
            elif (is_now := _properties(present[number])) != (was := self._properties[number]):
                changes.setdefault(_difference(was, is_now), []).append(name)
        gone = {name for number, name in self._names.items() if number not in present}
        for name, parameter in now.items():
            if id(parameter) not in self._names and name not in gone:
                what = "unfrozen" if name in self._frozen else "added"
                changes.setdefault(what, []).append(name)
        return [f"{what}: {', '.join(names)}" for what, names in changes.items()]

    def _find_shared(self) -> list[str]:
        return [
            f"{name} is {other._names[id(parameter)]} of a {other._of}"
            for other in _alive
            for name, parameter in self.named.items()
            if id(parameter) in other._names
        ]


def _properties(parameter: nn.Parameter) -> _Properties:
    return parameter.dtype, parameter.device, parameter.shape


def _difference(was: _Properties, is_now: _Properties) -> str:
    differing = [i for i in range(len(was)) if was[i] != is_now[i]]
    before, after = (" ".join(_name_of(properties[i]) for i in differing) for properties in (was, is_now))
    return f"{before} before and {after} now"


def _name_of(value: torch.dtype | torch.device | torch.Size) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
