"""Buffers of a replicated module: broadcast from rank 0, or handled by a user's hook."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_compile import torch_internals
from ddp_compile.errors import ReductionError, this_rank
from ddp_compile.runtime.comm.collectives import broadcast_all
from ddp_compile.runtime.desync.monitor import DesyncMonitor

#: Called with its state and the buffers by name. It may return futures, which the end of the backward waits for.
BufferHook = Callable[[Any, Mapping[str, Tensor]], "list[torch.futures.Future[Any]] | None"]


class _Hook(NamedTuple):
    function: BufferHook
    state: object
    is_after_forward: bool


class ReplicatedBuffers:
    """Keeps the buffers of one module equal on all ranks.

    Args:
        ignored: Fully qualified names of buffers that stay local.
        is_on: False if buffers are left alone before forwards.
        monitor: Is told of ranks that did not come.
    """

    def __init__(
        self,
        module: nn.Module,
        ignored: Collection[str],
        is_on: bool,
        process_group: dist.ProcessGroup,
        monitor: DesyncMonitor,
    ) -> None:
        # Modules and names instead of tensors, since a module may replace the tensor of a buffer.
        self._places = {
            fqn: (owner, name)
            for prefix, owner in module.named_modules()
            for name in owner._buffers
            if (fqn := f"{prefix}.{name}".lstrip(".")) not in ignored
        }
        self._is_on = is_on
        self._process_group = process_group
        self._monitor = monitor
        self._hook: _Hook | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The buffers that exist now, by fully qualified name."""
        present = {fqn: owner._buffers.get(name) for fqn, (owner, name) in self._places.items()}
        return {fqn: buffer for fqn, buffer in present.items() if buffer is not None}

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

        Args:
            kind: The kind of forward, for the statuses of the ranks.
            source: The rank in the group whose buffers are broadcast.

        Raises:
            ReductionError: Another rank did not come.
        """
        buffers = self.synchronized()
        if not buffers or (self._hook is not None and self._hook.is_after_forward):
            return []
        self._monitor.buffers_are_broadcast(kind)
        if self._hook is not None:
            return self._call(self._hook)
        try:
            broadcast_all(buffers, self._process_group, source)
        except RuntimeError as error:
            failure = ReductionError(
                f"{this_rank()}: the broadcast of {len(buffers)} buffers from rank {source} before the forward failed."
                f" Another rank has raised, exited, or not called the model; look for its error. ({error})"
            )
            raise self._monitor.report_failure(failure) from error
        return []

    def after_forward(self) -> list[torch.futures.Future[Any]]:
        """Call a hook whose place is after the forward; returns futures like `before_forward`."""
        if self._hook is None or not self._hook.is_after_forward or not self.synchronized():
            return []
        return self._call(self._hook)

    def _call(self, hook: _Hook) -> list[torch.futures.Future[Any]]:
        buffers = self.tensors()
        with torch.no_grad(), torch_internals.preserved_versions(list(buffers.values())):
            return list(hook.function(hook.state, buffers) or [])
