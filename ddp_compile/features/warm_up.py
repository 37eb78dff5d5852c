"""Compiles forward and backward before the first step, without a collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError, this_rank

if TYPE_CHECKING:
    from ddp_compile.module.replicate_state import ReplicateState


def warm_up(
    state: ReplicateState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
) -> None:
    """See ``ReplicatedModule.warm_up``."""
    if not state.reducer.is_between_steps or not torch.is_grad_enabled():
        raise ReplicationError(
            f"{this_rank()}: model.warm_up() was called inside a step, or under no_grad; call it between two steps,"
            " with gradients enabled"
        )
    before, state.requires_sync = state.requires_sync, False
    try:
        with _restored(state, module):
            _compile(module(*args, **kwargs), list(state.reduced.values()))
    except Exception as error:
        state.monitor.warm_up_raised(error)
        raise
    finally:
        state.requires_sync = before
    state.monitor.agree_on_warm_up(timeout_s)


def _compile(outputs: Any, parameters: list[nn.Parameter]) -> None:
    """Run the backward, whose code is compiled when it runs for the first time."""
    heads = [tensor for tensor in torch_internals.tensors_in(outputs) if tensor.requires_grad]
    if not heads:
        raise ReplicationError(
            f"{this_rank()}: model.warm_up() found no output with a gradient; the outputs must be tensors, in"
            " containers that pytree knows, and depend on the parameters"
        )
    # Not `backward`: no AccumulateGrad node runs, so no ``.grad`` changes and no hook of the reducer is called.
    torch.autograd.grad(heads, parameters, [torch.zeros_like(head) for head in heads], allow_unused=True)


@contextmanager
def _restored(state: ReplicateState, module: nn.Module) -> Iterator[None]:
    """Afterward buffers and random states are what they were."""
    places = [(owner, name) for owner in module.modules() for name in owner._buffers]
    kept: list[tuple[Tensor | None, Tensor | None]] = [
        (buffer, None if buffer is None else buffer.detach().clone())
        for owner, name in places
        for buffer in [owner._buffers[name]]
    ]
    device = state.device
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
            yield
    finally:
        for (owner, name), (buffer, value) in zip(places, kept, strict=True):
            owner._buffers[name] = buffer
            if buffer is not None and value is not None:
                with torch.no_grad():
                    buffer.copy_(value)
