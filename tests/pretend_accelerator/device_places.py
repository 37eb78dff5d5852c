"""Where a program trains: on which device and stream."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import device
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_compile import ddp_compile

WIDTH, ROWS = 24, 4
CAP_MB = 0.003  # a block each


class Placement(NamedTuple):
    """Where each rank trains: always on the device whose index is its rank."""

    is_on_side_stream: bool
    is_device_set: bool  #: whether that device is the current one; otherwise device 0 is


PLACEMENTS = {
    "default stream": Placement(is_on_side_stream=False, is_device_set=True),
    "side stream": Placement(is_on_side_stream=True, is_device_set=True),
    "device not set": Placement(is_on_side_stream=False, is_device_set=False),
    "side stream, device not set": Placement(is_on_side_stream=True, is_device_set=False),
}


@dataclass
class Where:
    """A device to train on; on the CPU models are not compiled."""

    device: torch.device

    def replicate(self, module: nn.Module, **settings: Any) -> Any:
        backend = "aot_eager" if self.device.type != "cpu" else "eager"
        return ddp_compile(module, **{"backend": backend, "bucket_cap_mb": CAP_MB, **settings})

    def batch(self, number: int) -> Tensor:
        """This rank's."""
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        return torch.randn(ROWS, WIDTH, generator=generator).to(self.device)


class Side:
    """A stream beside the current one; nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Inside, it is the current one, after waiting for the one that was."""
        if self._stream is None:
            yield
            return
        index, previous = torch.accelerator.current_device_index(), torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(previous)
        torch.accelerator.set_stream(self._stream)
        torch.accelerator.set_device_index(index)
        try:
            yield
        finally:
            torch.accelerator.set_stream(previous)
            torch.accelerator.set_device_index(index)

    def before_current(self) -> None:
        """The current one waits for it."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)


@contextmanager
def placed(placement: Placement) -> Iterator[Where]:
    own = torch.device(device.DEVICE, dist.get_rank())
    torch.accelerator.set_device_index(own.index if placement.is_device_set else 0)
    side = Side(own)
    with side.after_current() if placement.is_on_side_stream else nullcontext():
        yield Where(own)
    side.before_current()
    torch.accelerator.synchronize(own)
