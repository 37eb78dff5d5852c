"""Data parallelism with collectives inside the traced graph, like SimpleFSDP's mode "replicate".

Source: Zhang et al., "SimpleFSDP: Simpler Fully Sharded Data Parallel with torch.compile", 2024 (the idea that a
parameter's gradient is reduced by the backward of an identity on the parameter, and that the compiler does the rest).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol


class _AverageGradient(torch.autograd.Function):
    """Identity whose backward averages the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group_name: str, world_size: int) -> Tensor:
        ctx.group_name, ctx.world_size = group_name, world_size
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Scaled before the sum, as in DistributedDataParallel, so that rounding is the same.
        return funcol.all_reduce(gradient / ctx.world_size, "sum", ctx.group_name), None, None


class FunctionalReplicate(nn.Module):
    """``module``, broadcast from rank 0, with parameters whose gradients are averaged inside the graph."""

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.module = module
        self.group_name = process_group.group_name
        self.world_size = process_group.size()
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0, group=process_group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        averaged = {
            name: _AverageGradient.apply(parameter, self.group_name, self.world_size)
            for name, parameter in self.module.named_parameters()
        }
        return torch.func.functional_call(self.module, averaged, args, kwargs)
