"""Buffers of a replicated module: broadcast from rank 0, or handled by a user's hook."""

import hashlib
import json
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_compile import torch_internals
from ddp_compile.config import ReplicateConfig
from ddp_compile.errors import RanksDifferError, ReductionError, number_of, this_rank
from ddp_compile.runtime.comm.collectives import broadcast_all, first_difference
from ddp_compile.runtime.comm.exchange import Exchange
from ddp_compile.runtime.comm.iteration_message import IterationMessage
from ddp_compile.runtime.desync.monitor import DesyncMonitor
from ddp_compile.validation.description import describe_buffers

#: Called with its state and the buffers by name. It may return futures, which the end of the backward waits for.
BufferHook = Callable[[Any, Mapping[str, Tensor]], "list[torch.futures.Future[Any]] | None"]


class _Hook(NamedTuple):
    function: BufferHook
    state: object
    is_after_forward: bool


class ReplicatedBuffers:
    """Keeps the buffers of one module equal on all ranks, and tells its monitor of ranks that did not come."""

    def __init__(
        self, module: nn.Module, config: ReplicateConfig, process_group: dist.ProcessGroup, monitor: DesyncMonitor
    ) -> None:
        # Modules and names, with fully qualified names, instead of tensors, which a module may replace.
        self._places = [
            (owner, {name: fqn for name, fqn in names.items() if fqn not in config.parameters_to_ignore})
            for prefix, owner in module.named_modules()
            if (names := {name: f"{prefix}.{name}".lstrip(".") for name, _ in owner._buffers.items()})
        ]
        self._is_on = config.broadcast_buffers
        self._process_group = process_group
        self._monitor = monitor
        self._hook: _Hook | None = None
        # torch's own layers keep the shapes of their buffers.
        owners = [type(owner) for owner, fqns in self._places if fqns]
        self._may_change = self._is_on and any(not cls.__module__.startswith("torch.nn.") for cls in owners)
        self._device = next((b.device for b in self.tensors().values()), next(module.parameters()).device)
        self._message = IterationMessage(process_group, self._device, self._may_change, monitor.model_number, own=True)
        self._described: tuple[Any, bytes] = None, b""  # dtypes and shapes, and a digest of their description

    def tensors(self) -> dict[str, Tensor]:
        """The buffers that exist now, by fully qualified name."""
        return {fqn: buffer for fqn, buffer in self._every().items() if buffer is not None}

    def _every(self) -> dict[str, Tensor | None]:
        return {fqns[n]: b for owner, fqns in self._places for n, b in owner._buffers.items() if n in fqns}

    def synchronized(self) -> list[Tensor]:
        """The buffers that are kept equal; none if that is off."""
        return list(self.tensors().values()) if self._is_on else []

    def register_hook(self, state: object, hook: Any, location: Any) -> None:
        """Replace the broadcast by a hook; see ``ReplicatedModule._register_buffer_comm_hook``."""
        if not callable(hook):
            raise TypeError(f"the buffer comm hook {hook!r} is not callable; pass hook(state, buffers by name)")
        name = location.name if isinstance(location, Enum) else str(location)
        if name not in ("PRE_FORWARD", "POST_FORWARD"):
            raise ValueError(f"comm_hook_location={location!r} must be PRE_FORWARD or POST_FORWARD")
        self._hook = _Hook(hook, state, name == "POST_FORWARD")

    def before_forward(self, kind: str, source: int) -> list[torch.futures.Future[Any]]:
        """Make buffers equal before a forward whose backward is to be reduced; returns futures for its end to wait for.

        Those of ``source``, a rank in the group, are broadcast. ``kind`` is that of the forward, for the statuses of
        the ranks.
        """
        buffers, hook = self.synchronized(), self._hook
        if (hook is not None and hook.is_after_forward) or not (buffers or (self._may_change and hook is None)):
            return []
        self._monitor.buffers_are_broadcast(kind)
        if hook is not None:
            return self._call(hook)

        def failed(error: RuntimeError) -> ReductionError:
            return ReductionError(
                f"{this_rank()}: the broadcast of {number_of(len(buffers), 'buffer')} from rank"
                f" {dist.get_global_rank(self._process_group, source)} before the forward failed: {error}. Unless that"
                " names the cause, another rank has raised, exited, or not called the model; look for its error"
            )

        # Transforms refuse writes to tensors that they were not given.
        with Exchange(failed, self._monitor), torch_internals.outside_transforms():
            self.refuse_differences()
            broadcast_all(buffers, self._process_group, source)
        return []

    def refuse_differences(self) -> None:
        """Raise a RanksDifferError on every rank if a buffer to broadcast has another shape or dtype on some rank.

        A module may replace a buffer by a larger one, for example a cache. No rank knows what the others have done, and
        gloo would end the process.
        """
        if not self._may_change:
            return
        buffers = self._every()
        now = [None if buffer is None else (buffer.dtype, buffer.shape) for buffer in buffers.values()]
        if now != self._described[0]:
            description = json.dumps(describe_buffers(buffers)).encode()
            self._described = now, hashlib.sha256(description).digest()[:16]
        # Each byte of the answer is the largest of all ranks, and 255 - b stands for the smallest b.
        own = bytearray(self._described[1] + bytes(255 - each for each in self._described[1]))
        self._message.send([own])
        (combined,) = self._message.wait()
        if self._message.has_met_another:
            self._monitor.refuse_other_message()
        if combined != own:
            difference = first_difference(describe_buffers(buffers), self._process_group, self._device)
            raise RanksDifferError(
                f"{this_rank()}: buffers cannot be broadcast, since they differ in shape or dtype: {difference}. Give"
                " the buffer the same ones on every rank, leave it out with parameters_to_ignore, or pass"
                " broadcast_buffers=False"
            )

    def after_forward(self) -> list[torch.futures.Future[Any]]:
        """Call a hook whose place is after the forward; returns futures like `before_forward`."""
        if self._hook is None or not self._hook.is_after_forward or not self.synchronized():
            return []
        return self._call(self._hook)

    def _call(self, hook: _Hook) -> list[torch.futures.Future[Any]]:
        buffers = self.tensors()
        with torch.no_grad(), torch_internals.preserved_versions(list(buffers.values())):
            return list(hook.function(hook.state, buffers) or [])
