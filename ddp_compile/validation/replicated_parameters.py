"""The reduced parameters of each replicated module: which have changed, and which two modules share."""

import gc
import weakref
from collections.abc import Container, Iterator, Mapping

import torch
from torch import Tensor, nn

from ddp_compile import torch_internals
from ddp_compile.runtime.comm import error_messages
from ddp_compile.validation.wrappers import reducing_wrappers_inside

# Of all replicated modules.
_alive: "weakref.WeakSet[ReplicatedParameters]" = weakref.WeakSet()

_Properties = tuple[torch.dtype, torch.device, torch.Size]


def reduced_parameters(module: nn.Module, ignored: Container[str]) -> dict[str, nn.Parameter]:
    """The parameters that are averaged over ranks, by fully qualified name; a tied parameter has its first name."""
    every_name = module.named_parameters(remove_duplicate=False) if ignored else ()
    ignored_ids = {id(parameter) for name, parameter in every_name if name in ignored}
    return {name: p for name, p in module.named_parameters() if p.requires_grad and id(p) not in ignored_ids}


class ReplicatedParameters:
    """The parameters that one module was replicated with; those named in ``ignored`` are not reduced."""

    def __init__(self, module: nn.Module, ignored: Container[str]) -> None:
        self.named = reduced_parameters(module, ignored)
        self._of = type(module).__name__
        self._ignored = ignored
        self._names = {id(parameter): name for name, parameter in self.named.items()}
        self._properties = {id(parameter): _properties(parameter) for parameter in self.named.values()}
        self._originals: weakref.WeakKeyDictionary[nn.Module, Mapping[str, Tensor]] = weakref.WeakKeyDictionary(
            {owner: {name: p for name, p in owner._parameters.items() if p is not None} for owner in module.modules()}
        )
        self._frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}

    def shared_with_others(self) -> list[str]:
        """The parameters that another replicated module reduces too, as in "head.weight is head.weight of a Task"."""
        if self._find_shared():
            gc.collect()  # frees modules that were dropped: their states are in cycles
        return self._find_shared()

    def register(self) -> None:
        """Record that the module is replicated."""
        _alive.add(self)

    def release(self) -> None:
        """Record that the module is no longer replicated."""
        _alive.discard(self)

    def refuse_changes(self, module: nn.Module) -> None:
        """Refuse parameters other than those that were replicated.

        A frozen or moved or renamed parameter is no change: a generator's step freezes the discriminator, and
        unfreezes it afterwards. If gradients are missing for that reason, `MissingGradientError` says so. Nor is a
        tensor that stands in for a parameter during one call: gradients reach the parameter if it is computed from it.
        """
        changes = [*reducing_wrappers_inside(module), *self._changes(module)]
        if changes:
            raise error_messages.parameters_changed(changes)

    def _present(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The parameters by all their names, in place of the tensors that stand in for them during one call."""
        swapped_in = torch_internals.swapped_in()
        for prefix, owner in module.named_modules(remove_duplicate=False):
            originals = self._originals.get(owner, {})
            for name, present in owner._parameters.items():
                if present is not None:
                    is_other = id(present) in swapped_in or torch_internals.only_stands_in(present)
                    yield f"{prefix}.{name}".lstrip("."), originals.get(name, present) if is_other else present

    def _changes(self, module: nn.Module) -> list[str]:
        at = dict(self._present(module))
        present = {id(parameter): parameter for parameter in at.values()}
        changes: dict[str, list[str]] = {}  # names, by what happened to them
        for number, name in self._names.items():
            if number not in present:
                other = at.get(name)
                what = "removed" if other is None else f"replaced by another {type(other).__name__}"
                changes.setdefault(what, []).append(name)
            elif (is_now := _properties(present[number])) != (was := self._properties[number]):
                changes.setdefault(_difference(was, is_now), []).append(name)
        gone = {name for number, name in self._names.items() if number not in present}
        known = self._names.keys() | {id(parameter) for name, parameter in at.items() if name in self._ignored}
        for name, parameter in at.items():
            if parameter.requires_grad and id(parameter) not in known and name not in gone:
                known.add(id(parameter))
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


def _properties(parameter: Tensor) -> _Properties:
    return parameter.dtype, parameter.device, parameter.shape


def _difference(was: _Properties, is_now: _Properties) -> str:
    differing = [i for i in range(len(was)) if was[i] != is_now[i]]
    before, after = (" ".join(_name_of(properties[i]) for i in differing) for properties in (was, is_now))
    return f"{before} before and {after} now"


def _name_of(value: torch.dtype | torch.device | torch.Size) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
