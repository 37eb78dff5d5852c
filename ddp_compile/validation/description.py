"""Descriptions of a module: for its plan, and for comparing ranks."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ddp_compile import torch_internals
from ddp_compile.config import ReplicateConfig
from ddp_compile.plan.spec import GradientSpec

_HALF = (torch.bfloat16, torch.float16)


def describe_gradients(
    module: nn.Module, named: Mapping[str, nn.Parameter], reduce_dtype: torch.dtype | None
) -> list[GradientSpec]:
    """The plan's data about each parameter, in registration order; ``reduce_dtype`` is that of ``ddp_compile``."""
    sparse, found = with_sparse_gradients(module), []
    for i, (fqn, p) in enumerate(named.items()):
        numel, dtype = torch_internals.local_tensor(p).numel(), _name(p.dtype)
        gradient = GradientSpec(i, fqn, numel, dtype, p.device.type, id(p) in sparse)
        if reduce_dtype is not None and p.dtype in _HALF and not gradient.is_sparse:
            gradient = replace(gradient, dtype=_name(reduce_dtype), param_dtype=dtype)
        found.append(gradient)
    return found


def with_sparse_gradients(module: nn.Module) -> set[int]:
    """The ids of the parameters whose layer announces sparse gradients."""
    layers = (layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag))
    return {id(layer.weight) for layer in layers if layer.sparse}


def describe_module(module: nn.Module, config: ReplicateConfig, launches_in_backward: bool) -> list[str]:
    """Lines that must be the same on every rank; with strides, since flat buffers follow them."""
    ignored = config.parameters_to_ignore
    sparse_ids = with_sparse_gradients(module)
    settings = (
        "broadcast_buffers",
        "init_sync",
        "find_unused_parameters",
        "skip_all_reduce_unused_params",
        "static_graph",
        "reduce_dtype",
        "check_replicas",
    )
    lines = [f"{name}={getattr(config, name)}" for name in settings]
    # After such launches the ranks exchange a message, so this must agree.
    lines.append(f"buckets launched inside the backward={launches_in_backward}")
    for name, parameter in module.named_parameters():
        if name not in ignored:
            strides = "" if parameter.is_contiguous() else f" with strides {list(parameter.stride())}"
            frozen = "" if parameter.requires_grad else " frozen"
            sparse = " with sparse gradient" if id(parameter) in sparse_ids else ""
            on = f"on {parameter.device.type}{_part_here(parameter)}"
            what = f"{_name(parameter.dtype)}{list(parameter.shape)}{strides} {on}{sparse}{frozen}"
            lines.append(f"parameter {name}: {what}")
    if config.broadcast_buffers or config.init_sync:
        lines += describe_buffers({name: buffer for name, buffer in module.named_buffers() if name not in ignored})
    return lines


def describe_buffers(buffers: Mapping[str, Tensor | None]) -> list[str]:
    """Lines that must be the same on every rank before buffers, by name, are broadcast."""
    return [
        f"buffer {name}: {'None' if b is None else f'{_name(b.dtype)}{list(b.shape)}{_part_here(b)}'}"
        for name, b in buffers.items()
    ]


def _part_here(tensor: Tensor) -> str:
    """This rank's part of a DTensor in words, the same on all ranks that average it."""
    if not torch_internals.is_dtensor(tensor):
        return ""
    placements = ", ".join(map(str, tensor.placements))
    return f" as DTensor with {placements}, of which {list(torch_internals.local_tensor(tensor).shape)} is here"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
