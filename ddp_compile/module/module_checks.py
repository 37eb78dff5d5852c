"""Checks of the module, its devices and its ranks, before anything is changed."""

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from ddp_compile import torch_internals
from ddp_compile.config import ReplicateConfig
from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.module.mixin import ReplicatedModule
from ddp_compile.module.replicated_class import defines, names_taken
from ddp_compile.runtime.comm import streams
from ddp_compile.validation.replicated_parameters import reduced_parameters
from ddp_compile.validation.wrappers import refuse_wrappers_inside


def check_module(module: nn.Module, ignored: frozenset[str]) -> None:
    """Raise unless a module can be replicated: not wrapped, lazy or on the meta device, and without our names."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"ddp_compile() needs a torch.nn.Module, not {type(module).__name__}")
    if isinstance(module, ReplicatedModule):
        raise ReplicationError("ddp_compile() was called twice on this module; call it once, or module.unwrap() first")
    refuse_wrappers_inside(module)
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    if unknown := sorted(ignored - {name for name, _ in named}):
        raise ReplicationError(f"parameters_to_ignore names {', '.join(unknown)}, which the module does not have")
    _check_trainable(reduced_parameters(module, ignored), bool(ignored))
    if hidden := [name for name in names_taken() if defines(module, name)]:
        raise ReplicationError(
            f"{type(module).__name__}.{hidden[0]} has the name of a method that ddp_compile adds; rename it, or"
            " replicate a module that holds this one"
        )


def check_devices(module: nn.Module, config: ReplicateConfig, process_group: dist.ProcessGroup) -> None:
    """Refuse tensors that the process group cannot send or average, and devices that the reducer does not support.

    Autograd has a thread for each accelerator, and one for the CPU. The reducer counts gradients without a lock, so all
    of them must arrive on one thread, which means from one device.
    """
    _refuse_sharded_over_replicas(module, config.parameters_to_ignore, process_group)
    reduced: dict[torch.device, str] = {}
    for name, parameter in reduced_parameters(module, config.parameters_to_ignore).items():
        reduced.setdefault(parameter.device, name)
    if len(reduced) > 1:
        places = ", ".join(f"{name} is on {device}" for device, name in reduced.items())
        raise ReplicationError(
            f"{this_rank()}: {places}; all reduced parameters must be on one device. Move them to one, start a rank for"
            " each device, or call ddp_compile on each part that is on one device"
        )
    types = torch_internals.device_types(process_group)
    first_on: dict[torch.device, str] = {}
    for name, tensor in _sent(module, config):
        first_on.setdefault(tensor.device, name)
    for device, name in first_on.items():
        where = f"{this_rank()}: {name} is on {device}"
        if device.type != "cpu" and not streams.has_streams(device):
            raise ReplicationError(
                f"{where}, and torch.{device.type} has no streams, which order collectives after the kernels that"
                " compute the gradients; move the module to the CPU, or to an accelerator with streams"
            )
        if types and device.type not in types:
            raise ReplicationError(
                f"{where}, but the process group sends tensors on {' and '.join(types)} only (backend"
                f" {dist.get_backend(process_group)!r}); move the module, or pass a process group with a backend for"
                f" {device.type}, as init_process_group('cpu:gloo,cuda:nccl') makes one for both"
            )


def _refuse_sharded_over_replicas(module: nn.Module, ignored: Container[str], process_group: dist.ProcessGroup) -> None:
    """Refuse DTensors that are sharded over the ranks to average over: each rank has another part of the tensor."""
    averaged = dist.get_process_group_ranks(process_group)
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if name in ignored or not torch_internals.is_dtensor(tensor):
            continue
        mesh = tensor.device_mesh
        ranks = mesh.mesh.flatten().tolist()
        if len(set(ranks) & set(averaged)) <= 1:
            continue
        names = f" ({', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else ""
        raise ReplicationError(
            f"{this_rank()}: {name} is a DTensor with {', '.join(map(str, tensor.placements))} over ranks"
            f" {ranks}{names}, but ddp_compile would average over ranks {averaged}, which hold different parts of it."
            " Make a mesh of two dimensions, mesh = init_device_mesh(device, (replicas, parts), mesh_dim_names=('dp',"
            " 'tp')); shard over one, parallelize_module(model, mesh['tp'], ...); and average over the other,"
            " ddp_compile(model, device_mesh=mesh['dp'])"
        )


def _sent(module: nn.Module, config: ReplicateConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are sent between ranks, by name."""
    not_sent = config.parameters_to_ignore
    yield from reduced_parameters(module, not_sent).items()
    if config.init_sync:
        yield from ((name, tensor) for name, tensor in module.named_parameters() if name not in not_sent)
    if config.init_sync or config.broadcast_buffers:
        yield from ((name, tensor) for name, tensor in module.named_buffers() if name not in not_sent)


def names_to_ignore(module: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """These names, and those that DistributedDataParallel's ``_set_params_and_buffers_to_ignore_for_model`` has set.

    Raises a TypeError for a single string, which would be split into letters.
    """
    if isinstance(names, str):
        raise TypeError(f"parameters_to_ignore={names!r} is one string; pass a list of names: [{names!r}]")
    return frozenset(names).union(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def _check_trainable(trainable: Mapping[str, nn.Parameter], some_are_ignored: bool) -> None:
    if not trainable and some_are_ignored:
        raise ReplicationError(
            "every parameter that requires a gradient is named in parameters_to_ignore, or in"
            " delay_all_reduce_named_params, so nothing is left to reduce; leave out one of them"
        )
    if not trainable:
        raise ReplicationError(
            "the module has no parameter that requires a gradient, so there is nothing to reduce; use it as it is"
        )
    for name, parameter in trainable.items():
        if isinstance(parameter, UninitializedParameter):
            raise ReplicationError(f"{name} has no shape yet; run one forward of the module before ddp_compile")
        if parameter.is_meta:
            raise ReplicationError(f"{name} is on the meta device; materialize the module: module.to_empty(device=...)")


def resolve_process_group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """The ranks to average over; raises a ReplicationError if they cannot be told."""
    if device_mesh is not None:
        if not isinstance(device_mesh, DeviceMesh):
            raise ReplicationError(
                f"device_mesh={device_mesh!r} is not a DeviceMesh; pass the result of init_device_mesh()"
            )
        if device_mesh.ndim != 1:
            names = f" ({', '.join(device_mesh.mesh_dim_names)})" if device_mesh.mesh_dim_names else ""
            raise ReplicationError(
                f"{this_rank()}: device_mesh has {device_mesh.ndim} dimensions{names}, but ddp_compile needs one; pass"
                " the one over which the module is replicated, for example mesh['dp']"
            )
        if device_mesh.get_coordinate() is None:
            raise ReplicationError(
                f"rank {dist.get_rank()} is not in device_mesh, which has ranks {device_mesh.mesh.tolist()}; call"
                " ddp_compile on its ranks only"
            )
        return device_mesh.get_group()
    if process_group is not None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise ReplicationError(
                f"process_group={process_group!r} is not a process group that this rank belongs to; pass the result of"
                " new_group(), on its own ranks only"
            )
        return process_group
    if not dist.is_available() or not dist.is_initialized():
        raise ReplicationError(
            "no process group: call torch.distributed.init_process_group() first and start the script with"
            " torchrun --standalone --nproc-per-node 2 train.py"
        )
    world = dist.group.WORLD
    assert world is not None
    return world
