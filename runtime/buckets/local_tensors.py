"""Parameters that are DTensors, of tensor parallelism for example.

The part of such a parameter that lies on this rank is reduced, over the ranks that hold the same part: the plan counts
its elements, the flat buffer holds them, and ``.grad`` stays the DTensor that the engine made. It never becomes a view
of the flat buffer, since one cannot know who holds the tensor inside a DTensor; the result is copied into it.

Note [Placements of gradients]
A gradient may have other placements than its parameter: the weight of a norm whose inputs are sharded by rows is the
same on all ranks, and its gradient is a partial sum on each. A rank without a gradient contributes zeros, which only
fit the parameter's placements, so a gradient gets those before it is accumulated. That is a collective over the ranks
of the mesh. They run the same graph, so all of them get its gradients in the same order. Their buckets may be complete
in different orders, since groups that reduce different parts have plans of their own.

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
    return any(map(torch_internals.is_dtensor, parameters))


def local_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The part of each tensor on this rank: the local tensor of a DTensor, and any other tensor itself."""
    return [torch_internals.local_tensor(tensor) for tensor in tensors]


def redistribution_to(placements: Sequence[Placement]) -> Callable[[tuple[Any, ...]], tuple[Any, ...] | None]:
    """A prehook of AccumulateGrad that gives gradients these placements; see Note [Placements of gradients]."""

    def prehook(gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
        gradient = gradients[0]
        if gradient is None or gradient.placements == placements:
            return None
        return (gradient.redistribute(placements=placements),)

    return prehook
