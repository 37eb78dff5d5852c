"""Parameters that are DTensors, of tensor parallelism for example.

What of such a parameter lies on this rank is reduced, over ranks that hold the same part of it: the plan counts its
elements, the flat buffer holds them, and ``.grad`` stays the DTensor that the engine made. It never becomes a view of
the flat buffer, since nobody can tell who holds the tensor inside a DTensor; the result is copied into it.

Note [Placements of gradients]
A gradient may have other placements than its parameter: the weight of a norm whose inputs are sharded by rows is the
same on all ranks, and its gradient is a partial sum on each. Where a rank has no gradient it contributes zeros, which
are a part of nothing else, so a gradient gets the parameter's placements before it is accumulated. That is a collective
over the ranks of the mesh. They run the same graph, so its gradients come in one order on all of them; buckets need not
be complete in one order there, as groups that reduce different parts have plans of their own.

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
    """What of each tensor lies on this rank: the memory of a DTensor, and any other tensor itself."""
    return [torch_internals.local_tensor(tensor) for tensor in tensors]


def redistribution_to(placements: Sequence[Placement]) -> Callable[[tuple[Any, ...]], tuple[Any, ...] | None]:
    """A prehook of AccumulateGrad that gives gradients these placements; see Note [Placements of gradients]."""

    def prehook(gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
        gradient = gradients[0]
        if gradient is None or gradient.placements == placements:
            return None
        return (gradient.redistribute(placements=placements),)

    return prehook
