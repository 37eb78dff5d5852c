"""The choice of an implementation, with its reason, and the interface of those that move a bucket's tensors."""

import functools
import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ddp_compile.errors import KernelUnavailableError
from ddp_compile.kernels.contract import layout
from ddp_compile.kernels.native import executor as native_executor
from ddp_compile.kernels.native import library as native_library

log = logging.getLogger(__name__)

ImplementationName = Literal["native", "cuda", "reference"]

#: Dtypes that "native" and "cuda" read and write. Other floating dtypes are left to the reference.
KERNEL_DTYPES = tuple(native_library.DTYPE_CODES)


class FlattenExecutor(Protocol):
    """Moves the tensors of one bucket into and out of its flat buffer. Made once for a bucket, used in every step."""

    def read(self, tensors: Sequence[Tensor], flat: Tensor, written: bool) -> Sequence[int]:
        """Read the tensors' addresses, without writing anything.

        Returns:
            Indices of the tensors that `move` will leave to the reference.

        Raises:
            ValueError: The tensors do not fit the plan, or a tensor that `move` will move shares memory with ``flat``
                outside its place or, if the tensors are ``written``, with another tensor.
        """

    def move(self, flat: Tensor, to_flat: bool, scale: float | Tensor) -> None:
        """Move the tensors that were read last, to or from the flat buffer; ``scale`` as for `FlattenPlan.flatten`."""


class ReferenceExecutor:
    """Leaves every tensor to the reference."""

    def __init__(self, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int] | None) -> None:
        layout.check_fit(tensors, flat, offsets)
        self._shapes = [tensor.shape for tensor in tensors]

    def read(self, tensors: Sequence[Tensor], flat: Tensor, written: bool) -> Sequence[int]:
        layout.check_tensors(tensors, self._shapes, flat)
        return range(len(tensors))

    def move(self, flat: Tensor, to_flat: bool, scale: float | Tensor) -> None:
        """`read` has left them all to the reference."""


class KernelStatus(NamedTuple):
    """The implementation of all kernels on one kind of device."""

    device_type: str
    implementation: ImplementationName
    reason: str


def status() -> list[KernelStatus]:
    """The implementation on the CPU and on the current CUDA device, with the reason. Never raises."""
    current = torch.cuda.current_device() if torch.cuda.is_available() else 0
    devices = (torch.device("cpu"), torch.device("cuda", current))
    return [KernelStatus(device.type, *available(device)) for device in devices]


def choose(device: torch.device, dtype: torch.dtype) -> ImplementationName:
    """The implementation for tensors of a dtype."""
    return available(device)[0] if dtype in KERNEL_DTYPES else "reference"


def executor_for(
    implementation: ImplementationName, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int] | None
) -> FlattenExecutor:
    """The executor of an implementation. Raises the errors of `layout`."""
    if implementation == "native":
        return native_executor.NativeExecutor(tensors, flat, offsets)
    if implementation == "cuda":
        from ddp_compile.kernels.cuda.executor import CudaExecutor  # loaded only if there is a GPU

        return CudaExecutor(tensors, flat, offsets)
    return ReferenceExecutor(tensors, flat, offsets)


@functools.cache
def available(device: torch.device) -> tuple[ImplementationName, str]:
    """The best implementation for a device, and the reason. Warns once if kernels are missing that should be there."""
    try:
        if device.type == "cpu":
            core = native_library.load()
            return "native", f"{core.path.name} with {core.instruction_set().decode()} instructions"
        if device.type == "cuda":
            from ddp_compile.kernels.cuda import module as cuda_module

            return "cuda", cuda_module.kernel_device(device).name
    except KernelUnavailableError as error:
        if device.type == "cpu" or torch.cuda.is_available():
            log.warning(f"gradients on {device} are moved by torch's own operations: {error}")
        return "reference", str(error)
    return "reference", f"there are no kernels for devices of type {device.type}"
