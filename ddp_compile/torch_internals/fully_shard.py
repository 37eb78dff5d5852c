"""The state of `torch.distributed.fsdp.fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def state_of_fully_shard(module: FSDPModule) -> object:
    """The state that all modules given to one call of ``fully_shard`` share."""
    return module._get_fsdp_state()


def parameters_of_fully_shard(module: FSDPModule) -> list[Parameter]:
    """The module's parameters as the DTensors that they are between steps, without those of nested calls."""
    return [each.sharded_param for group in _groups_of(module) for each in group.fsdp_params]


def ranks_of_fully_shard(module: FSDPModule) -> list[int]:
    """The global ranks over which FSDP2 itself averages a module's gradients, in the order of the mesh."""
    groups = _groups_of(module)
    if not groups:
        return []
    info = groups[0].mesh_info
    if info.replicate_mesh_dim is None:
        return dist.get_process_group_ranks(info.shard_process_group)
    return info.mesh.mesh.flatten().tolist()


def all_reduce_hook_of_fully_shard(module: FSDPModule) -> Callable[[Tensor], None] | None:
    """The hook that ``set_all_reduce_hook`` set, if any."""
    return next((group._all_reduce_hook for group in _groups_of(module)), None)


def remove_all_reduce_hook(module: FSDPModule) -> None:
    """Undo ``set_all_reduce_hook``, which does not accept None."""
    for group in _groups_of(module):
        group._all_reduce_hook = None


def _groups_of(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group  # torch 2.11 has one at most
    return [] if group is None else [group]
