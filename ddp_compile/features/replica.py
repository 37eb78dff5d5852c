"""The interface of a replicated module for features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch.nn import Parameter

from ddp_compile.config import ReplicateConfig
from ddp_compile.plan.builder import PlanBuilder
from ddp_compile.runtime.desync.monitor import DesyncMonitor
from ddp_compile.runtime.reducer import Reducer

if TYPE_CHECKING:
    from ddp_compile.features.measurement import Measurement
    from ddp_compile.features.optimizer_in_backward import OptimizersInBackward
    from ddp_compile.features.replicated_buffers import ReplicatedBuffers
    from ddp_compile.features.uneven_inputs import UnevenInputs


class Replica(Protocol):
    """A `ReplicateState`, which is defined in a higher layer."""

    config: ReplicateConfig
    process_group: dist.ProcessGroup
    device: torch.device
    reduced: Mapping[str, Parameter]
    builder: PlanBuilder
    reducer: Reducer
    buffers: ReplicatedBuffers
    optimizers: OptimizersInBackward
    uneven_inputs: UnevenInputs
    monitor: DesyncMonitor
    measurement: Measurement | None
    normalizes: bool

    @property
    def runs_uncompiled(self) -> bool: ...

    @property
    def evaluates_eagerly(self) -> bool: ...

    def region_begins(self) -> None: ...

    def shadow_buffers(self, source: int) -> None: ...

    def broadcast_model(self, source: int) -> None: ...
