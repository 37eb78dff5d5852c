"""What would not see trained parameters change any more once they have moved into flat buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from torch import nn
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.errors import shorten_names


def objection_to_moving(module: nn.Module, parameters: Sequence[Parameter], names: Sequence[str]) -> str:
    """Say what of a module, or which other processes, trained parameters share memory with; empty if nothing.

    Attributes of modules that are no buffers are not looked at: ``torch.nn.utils.spectral_norm`` has one on the memory
    of a parameter, and makes it anew in each forward.

    Args:
        module: Its other parameters and its buffers are looked at.
        parameters: What will be moved.
        names: Theirs.
    """
    if shared := _on_one_storage(module, {id(p): (p, name) for p, name in zip(parameters, names, strict=True)}):
        return (
            f"parameters lie in one storage, and would not any more: {'; '.join(map(', '.join, shared))}."
            " Register one Parameter in both places, or give each memory of its own: p.data = p.data.clone()"
        )
    between_processes = [
        name for p, name in zip(parameters, names, strict=True) if p.device.type == "cpu" and p.is_shared()
    ]
    if between_processes:
        return (
            "parameters lie in memory that other processes share (share_memory(), or a model passed to a process), and"
            f" would not any more: {shorten_names(between_processes)}. Give each memory of its own,"
            " p.data = p.data.clone(), and let other processes have a copy of the model, written behind steps:"
            " copy.load_state_dict(model.state_dict())"
        )
    return ""


def _on_one_storage(module: nn.Module, trained: Mapping[int, tuple[Parameter, str]]) -> list[list[str]]:
    """What lies on one storage with a trained parameter, in words."""
    of_storage: dict[int, list[str]] = {}
    for parameter, name in trained.values():
        if parameter.numel() and (key := torch_internals.storage_key(parameter)) is not None:
            of_storage.setdefault(key, []).append(name)
    others = chain(
        (("parameter", name, p) for name, p in module.named_parameters()),
        (("buffer", name, b) for name, b in module.named_buffers()),
    )
    for kind, name, tensor in others:
        key = None if id(tensor) in trained else torch_internals.storage_key(tensor)
        if key in of_storage:
            of_storage[key].append(f"the {kind} {name}, which is not trained")
    return [names for names in of_storage.values() if len(names) > 1]
