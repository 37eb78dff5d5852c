"""What ``ddp_compile`` is given, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ddp_compile.replicate import ReplicatedModule, reduced_parameters


def check_module(module: nn.Module, ignored: Sequence[str]) -> None:
    """Refuse what cannot be replicated, by name.

    Raises:
        TypeError: Not a module.
        ValueError: Wrapped already, nothing to train, on the meta device, or with attributes that ours would hide.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"ddp_compile() needs a torch.nn.Module, not {type(module).__name__}")
    if isinstance(module, ReplicatedModule):
        raise ValueError("ddp_compile() was called twice on this module; call it once, or module.unwrap() first")
    for name, submodule in module.named_modules():
        _refuse_wrapper(name, submodule)
    names = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    if unknown := sorted(set(ignored) - names):
        raise ValueError(f"parameters_to_ignore names {', '.join(unknown)}, which the module does not have")
    trainable = reduced_parameters(module, ignored)
    if not trainable:
        raise ValueError(
            "the module has no parameter that requires a gradient, so nothing is to be reduced; use it as is"
        )
    if on_meta := [name for name, p in trainable.items() if p.is_meta]:
        raise ValueError(f"{on_meta[0]} is on the meta device; materialise the module: module.to_empty(device=...)")
    ours = [name for name in vars(ReplicatedModule) if not name.startswith("_") and name not in vars(nn.Module)]
    if hidden := [name for name in ours if hasattr(module, name)]:
        raise ValueError(
            f"{type(module).__name__}.{hidden[0]} has the name of a method that ddp_compile adds; rename it, or"
            " replicate a module that holds this one"
        )


_WRAPPERS = {
    "DistributedDataParallel": "pass the module inside it: ddp_compile(model.module)",
    "DataParallel": "pass the module inside it: ddp_compile(model.module)",
    "FullyShardedDataParallel": "its gradients are reduced already; use one of the two",
    "FSDPModule": "its gradients are reduced already; use one of the two",
    "OptimizedModule": "ddp_compile compiles by itself; pass the module inside it: ddp_compile(model._orig_mod)",
    "ReplicatedModule": "replicate the outermost module only",
    "ScriptModule": "Dynamo cannot trace TorchScript; pass the Python module",
}


def _refuse_wrapper(name: str, submodule: nn.Module) -> None:
    for cls in type(submodule).__mro__:
        if cls.__name__ in _WRAPPERS:
            where = f"submodule {name}" if name else "the module"
            raise ValueError(f"{where} is a {cls.__name__}; {_WRAPPERS[cls.__name__]}")


def resolve_process_group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """The ranks to reduce over.

    Raises:
        ValueError: Both were given, or a mesh of more than one dimension.
        RuntimeError: No process group has been initialised.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("process_group and device_mesh exclude each other; pass one of them")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"device_mesh has {device_mesh.ndim} dimensions, ddp_compile needs one; pass for example mesh['dp']"
            )
        return device_mesh.get_group()
    if process_group is not None:
        return process_group
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group() first and start the script with"
            " torchrun --standalone --nproc-per-node 2 train.py"
        )
    world = dist.group.WORLD
    assert world is not None
    return world
