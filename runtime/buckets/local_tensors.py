"""Parameters that are DTensors, for example of tensor parallelism.

This rank's part of such a parameter is reduced over the ranks that hold the same part. The plan counts the elements of
this part, and the flat buffer holds them. ``.grad`` stays the DTensor that the engine made, and the result is copied
into it. It never becomes a view of the flat buffer, since there is no way to know what else holds the tensor inside a
DTensor.

Note [Placements of gradients]
A gradient may have other placements than its parameter. For example, if a norm's inputs are sharded by rows, its weight
is the same on all ranks and its gradient is a partial sum on each. A rank without a gradient contributes zeros, which
only fit the parameter's placements. So a gradient is redistributed to these before it is accumulated, by a collective
over the ranks of the mesh. These ranks run the same graph, so all of them get its gradients in the same order. But
their buckets may become complete in different orders, since groups that reduce different parts have different plans.

Source: ``_get_grad_inner_tensor`` of ``FSDPParam`` in torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def has_dtensors(parameters: Sequence[Parameter]) -> bool:
    """Whether any of the parameters is one."""
    return any(map(torch_internals.is_dtensor, parameters))


def local_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of each tensor: the local tensor of a DTensor, and any other tensor itself."""
    return [torch_internals.local_tensor(tensor) for tensor in tensors]


def redistribution_to(placements: Sequence[Placement]) -> Callable[[tuple[Any, ...]], tuple[Any, ...] | None]:
    """A prehook of AccumulateGrad that gives gradients these placements; see Note [Placements of gradients]."""

    def prehook(gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
        gradient = gradients[0]
        if gradient is None or gradient.placements == placements:
            return None
        return (gradient.redistribute(placements=placements),)

    return prehook
