"""The kernels of each CUDA device of this process, compiled and loaded at first use.

Nothing here touches CUDA before a kernel or the description is requested, or if torch sees no device.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ddp_compile.errors import KernelUnavailableError
from ddp_compile.kernels.cuda import binary_cache
from ddp_compile.kernels.cuda.arguments import BLOCK_THREADS, Arguments
from ddp_compile.kernels.cuda.compiler import OPTIONS, Compiler
from ddp_compile.kernels.cuda.driver import CudaDriver, Driver
from ddp_compile.kernels.cuda.programs import LARGEST_KERNEL, PROGRAM_OF, Program, headers

log = logging.getLogger(__name__)


class KernelDevice:
    """One device, with the kernels loaded onto it.

    Args:
        binary_of: Compiles a program, or reads its binary from the cache.
        current_stream: Returns torch's current stream.
    """

    def __init__(
        self,
        driver: Driver,
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
        """Compile and load a kernel, with all others of its program, unless it is already loaded.

        Raises:
            KernelUnavailableError: It cannot be compiled, or the driver refuses it.
        """
        if kernel in self._functions:
            return self._functions[kernel]
        with self._lock:
            if kernel not in self._functions:
                module = self._driver.load(self._binary_of(PROGRAM_OF[kernel]))
                for name in PROGRAM_OF[kernel].kernels:
                    self._functions[name] = self._driver.function(module, name)
        return self._functions[kernel]

    def launch(self, kernel: str, num_blocks: int, arguments: Arguments) -> None:
        """Start a kernel on torch's current stream. ``arguments`` are copied before this returns."""
        function = self._functions.get(kernel) or self.prepare(kernel)
        self._driver.launch(function, num_blocks, BLOCK_THREADS, arguments.parameters, self._current_stream())


class _Binaries:
    """Programs compiled for one architecture, kept on disk."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._compiler = Compiler()
        self._target = self._compiler.target(capability)
        self._cache = binary_cache.BinaryCache(binary_cache.default_folder())
        self.history = ""

    def __call__(self, program: Program) -> bytes:
        sources = hashlib.sha256("".join([program.text(), *headers().values()]).encode()).hexdigest()
        key = " ".join([sources, self._target, self._compiler.version, *OPTIONS])
        start = time.perf_counter()
        binary, was_found = self._cache.get(key, lambda: self._compiler.compile(program, self._target))
        seconds = time.perf_counter() - start
        log.debug("%s for %s: %s in %.3f s", program.name, self._target, "read" if was_found else "compiled", seconds)
        if not self.history:
            self.history = f"first kernel {'read from' if was_found else 'compiled into'} {self._cache.folder}"
        return binary

    def __str__(self) -> str:
        return f"{self._target}, NVRTC {self._compiler.version}, {self.history}"


#: ``CU_STREAM_LEGACY``, torch's default stream. If cuda-python uses a default stream for each thread, 0 is another one.
_LEGACY_DEFAULT_STREAM = 1

_devices: dict[int, KernelDevice | str] = {}
_lock = threading.Lock()


def kernel_device(device: torch.device | None = None) -> KernelDevice:
    """The kernels of a CUDA device; None for torch's current device.

    Raises:
        KernelUnavailableError: There is no such device, or something that the kernels need is missing.
    """
    if device is not None and isinstance(known := _devices.get(device.index), KernelDevice):
        return known
    if torch.version.cuda is None:
        raise KernelUnavailableError(f"torch {torch.__version__} was built without CUDA")
    if not torch.cuda.is_available():
        raise KernelUnavailableError("torch sees no CUDA device")
    ordinal = device.index if device is not None and device.index is not None else torch.cuda.current_device()
    with _lock:
        if ordinal not in _devices:
            _devices[ordinal] = _open_or_reason(ordinal)
        found = _devices[ordinal]
    if isinstance(found, str):
        raise KernelUnavailableError(found)
    return found


def description(device: torch.device | None = None) -> str:
    """Architecture, NVRTC and origin of the kernels on a CUDA device; None for torch's current device.

    Raises:
        KernelUnavailableError: As `kernel_device`.
    """
    return kernel_device(device).name


def _open_or_reason(ordinal: int) -> KernelDevice | str:
    properties = torch.cuda.get_device_properties(ordinal)
    try:
        binaries = _Binaries((properties.major, properties.minor))
        device = KernelDevice(
            CudaDriver(ordinal),
            binaries,
            lambda: torch.cuda.current_stream(ordinal).cuda_stream or _LEGACY_DEFAULT_STREAM,
            properties.multi_processor_count,
            properties.name,
        )
        # To check that compiling, loading and the cache work, with the largest arguments too.
        device.prepare(LARGEST_KERNEL)
    except KernelUnavailableError as error:
        return str(error)  # executors.py warns of it
    device.name = f"{properties.name}, {binaries}"
    return device
