"""What `torch.distributed.fsdp.fully_shard` keeps of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def state_of_fully_shard(module: FSDPModule) -> object:
    """What the modules share that one call of ``fully_shard`` was given."""
    return module._get_fsdp_state()


def parameters_of_fully_shard(module: FSDPModule) -> list[Parameter]:
    """The DTensors that the module's parameters are outside of forwards and backwards; not those of nested calls."""
    return [each.sharded_param for group in _groups_of(module) for each in group.fsdp_params]


def ranks_of_fully_shard(module: FSDPModule) -> list[int]:
    """The global ranks over which a module's gradients are averaged by FSDP2 itself, in the order of the mesh."""
    groups = _groups_of(module)
    if not groups:
        return []
    info = groups[0].mesh_info
    if info.replicate_mesh_dim is None:
        return dist.get_process_group_ranks(info.shard_process_group)
    return info.mesh.mesh.flatten().tolist()


def all_reduce_hook_of_fully_shard(module: FSDPModule) -> Callable[[Tensor], None] | None:
    """What ``set_all_reduce_hook`` was given last."""
    return next((group._all_reduce_hook for group in _groups_of(module)), None)


def remove_all_reduce_hook(module: FSDPModule) -> None:
    """Undo ``set_all_reduce_hook``, which takes no None."""
    for group in _groups_of(module):
        group._all_reduce_hook = None


def _groups_of(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group  # torch 2.11 has one at most
    return [] if group is None else [group]
