"""DTensors of a module: over which ranks they may be sharded."""

from __future__ import annotations

import itertools
from collections.abc import Container

import torch.distributed as dist
from torch import nn

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError, this_rank


def refuse_sharded_over_replicas(module: nn.Module, ignored: Container[str], process_group: dist.ProcessGroup) -> None:
    """Refuse DTensors that are spread over the ranks to average over, which hold different parts of one tensor.

    Args:
        module: The module.
        ignored: Names of parameters and buffers that are neither broadcast nor reduced.
        process_group: The ranks to average over.

    Raises:
        ReplicationError: Names this rank, the tensor, its mesh and the way out.
    """
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
            f" {ranks}{names}, and ranks {averaged} are to be averaged, so different parts of it would be. Make a mesh"
            " of two dimensions, mesh = init_device_mesh(device, (replicas, parts), mesh_dim_names=('dp', 'tp')); shard"
            " over one, parallelize_module(model, mesh['tp'], ...); and average over the other, ddp_compile(model,"
            " device_mesh=mesh['dp'])"
        )
