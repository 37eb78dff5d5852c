"""The kernels of each CUDA device of this process, compiled and loaded at first use.

Nothing here touches CUDA before a kernel is requested, or if torch sees no device.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ddp_compile.errors import KernelUnavailableError
from ddp_compile.kernels.cuda.arguments import BLOCK_THREADS, Arguments
from ddp_compile.kernels.cuda.compiler import Compiler
from ddp_compile.kernels.cuda.driver import CudaDriver
from ddp_compile.kernels.cuda.programs import LARGEST_KERNEL, PROGRAM_OF, Program
from ddp_compile.kernels.native import library

log = logging.getLogger(__name__)


class KernelDevice:
    """One device, with the kernels loaded onto it. In messages, ``name`` is that of it and of its compiler."""

    def __init__(
        self,
        driver: CudaDriver,
        binary_of: Callable[[Program], bytes],
        current_stream: Callable[[], int],
        num_multiprocessors: int,
        name: str,
    ) -> None:
        self.num_multiprocessors = num_multiprocessors
        self.name = name
        self._driver = driver
        self._binary_of = binary_of
        self._current_stream = current_stream
        self._functions: dict[str, Any] = {}
        self._lock = threading.Lock()

    def prepare(self, kernel: str) -> Any:
        """Load a kernel and all others of its program, unless loaded; raises a KernelUnavailableError if that fails."""
        if kernel in self._functions:
            return self._functions[kernel]
        with self._lock:
            if kernel not in self._functions:
                program, start = PROGRAM_OF[kernel], time.perf_counter()
                module = self._driver.load(self._binary_of(program))
                for name in program.kernels:
                    self._functions[name] = self._driver.function(module, name)
                log.debug("%s: %s compiled in %.3f s", self.name, program.name, time.perf_counter() - start)
        return self._functions[kernel]

    def launch(self, kernel: str, num_blocks: int, arguments: Arguments) -> None:
        """Start a kernel on torch's current stream. ``arguments`` are copied before this returns."""
        function = self._functions.get(kernel) or self.prepare(kernel)
        self._driver.launch(function, num_blocks, BLOCK_THREADS, arguments.parameters, self._current_stream())


#: ``CU_STREAM_LEGACY``, torch's default stream. If cuda-python uses a default stream for each thread, 0 is another one.
_LEGACY_DEFAULT_STREAM = 1

_devices: dict[int, KernelDevice] = {}
_lock = threading.Lock()


def kernel_device(device: torch.device) -> KernelDevice:
    """The kernels of a CUDA device, given with its index; raises a KernelUnavailableError if something is missing."""
    assert device.index is not None
    if (known := _devices.get(device.index)) is not None:
        return known
    if torch.version.cuda is None:
        raise KernelUnavailableError(f"torch {torch.__version__} was built without CUDA")
    if not torch.cuda.is_available():
        raise KernelUnavailableError("torch sees no CUDA device")
    with _lock:
        if device.index not in _devices:
            _devices[device.index] = _open(device.index)
        return _devices[device.index]


def _open(ordinal: int) -> KernelDevice:
    library.load()  # which reads the tensors' addresses
    properties = torch.cuda.get_device_properties(ordinal)
    compiler = Compiler()
    target = compiler.target((properties.major, properties.minor))
    device = KernelDevice(
        CudaDriver(ordinal),
        lambda program: compiler.compile(program, target),
        lambda: torch.cuda.current_stream(ordinal).cuda_stream or _LEGACY_DEFAULT_STREAM,
        properties.multi_processor_count,
        f"{properties.name}, {target}, NVRTC {compiler.version}",
    )
    # To check that compiling and loading work, with the largest arguments too.
    device.prepare(LARGEST_KERNEL)
    return device
