"""Compiles forward and backward before the first step, without a collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError, this_rank

if TYPE_CHECKING:
    from ddp_compile.module.replicate_state import ReplicateState


def warm_up(
    state: ReplicateState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
) -> None:
    """See ``ReplicatedModule.warm_up``."""
    try:
        if not torch.is_grad_enabled():
            raise ReplicationError(f"{this_rank()}: model.warm_up() was called under no_grad; call it with gradients")
        in_no_sync = state.setting("requires_sync", False)
        with in_no_sync, state.reducer.leaving_no_trace("model.warm_up()"), _restored(state, module):
            trained = [parameter for parameter in state.reduced.values() if parameter.requires_grad]
            _compile(module(*args, **kwargs), trained)
    except Exception as error:
        state.monitor.warm_up_raised(error)
        raise
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
    if parameters:
        torch.autograd.grad(heads, parameters, [torch.zeros_like(head) for head in heads], allow_unused=True)


@contextmanager
def _restored(state: ReplicateState, module: nn.Module) -> Iterator[None]:
    """Afterward buffers and random states are what they were."""
    kept = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    devices = [] if state.device.type == "cpu" else [state.device]
    try:
        with torch.random.fork_rng(devices, device_type=state.device.type if devices else "cuda"):
            yield
    finally:
        for owner, name, buffer, value in kept:
            owner._buffers[name] = buffer
            # Compared, since compiled code may write without a new version, and some buffers can never be written.
            if not torch.equal(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)
