"""The functions of the CUDA driver that launches need, through cuda.bindings."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from ddp_compile.errors import KernelUnavailableError

# In the form of cuDriverGetVersion. Older drivers take 4 KiB of arguments; the largest of PACK_SIZES needs 32 KiB.
OLDEST_DRIVER = 12010


class CudaDriver:
    """The driver, with the primary context of one device, which torch uses.

    Each thread has a current context, which may be the wrong one: a thread has none before its first call of the CUDA
    runtime. The tests have a driver that runs kernels on the CPU. ``ordinal`` is the device's number, as in
    ``torch.device("cuda", ordinal)``. torch has initialized CUDA already. Raises a KernelUnavailableError if the driver
    is too old, or refuses a call.
    """

    def __init__(self, ordinal: int) -> None:
        from cuda.bindings import driver

        self._api: Any = driver
        self._call = functools.partial(call, driver)
        (version,) = self._call("cuDriverGetVersion")
        if version < OLDEST_DRIVER:
            raise KernelUnavailableError(
                f"the kernels need a driver for CUDA {_text(OLDEST_DRIVER)} or newer, but this one is for"
                f" {_text(version)}; install a newer one"
            )
        (device,) = self._call("cuDeviceGet", ordinal)
        # Never released, since torch keeps the primary context as long as the process lives.
        (self._context,) = self._call("cuDevicePrimaryCtxRetain", device)
        self._context_address = int(self._context)
        self._launch = driver.cuLaunchKernel
        self._current_context = driver.cuCtxGetCurrent

    def load(self, binary: bytes) -> Any:
        """The module of a binary. Works during a graph capture too."""
        with self._loading():
            (module,) = self._call("cuModuleLoadData", binary)
        return module

    def function(self, module: Any, name: str) -> Any:
        """A kernel of a module."""
        with self._loading():
            (function,) = self._call("cuModuleGetFunction", module, name.encode())
        return function

    def launch(self, function: Any, num_blocks: int, num_threads: int, parameters: int, stream: int) -> None:
        """Start a kernel on a stream. ``parameters`` is the address of an array of the addresses of its parameters."""
        previous = self._enter()
        try:
            (status,) = self._launch(function, num_blocks, 1, 1, num_threads, 1, 1, 0, stream, parameters, 0)
        finally:
            self._leave(previous)
        if int(status) != 0:
            raise RuntimeError(f"a CUDA kernel could not be launched: {status.name}")

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """The context, and permission to load during a capture. With lazy loading, `function` loads the kernel."""
        relaxed = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        previous = self._enter()
        try:
            (mode,) = self._call("cuThreadExchangeStreamCaptureMode", relaxed)
            try:
                yield
            finally:
                self._call("cuThreadExchangeStreamCaptureMode", mode)
        finally:
            self._leave(previous)

    def _enter(self) -> Any:
        """Make the context current; returns the one to restore, or None."""
        _, current = self._current_context()
        if int(current) == self._context_address:
            return None
        self._call("cuCtxSetCurrent", self._context)
        return current if int(current) != 0 else None

    def _leave(self, previous: Any) -> None:
        if previous is not None:
            self._call("cuCtxSetCurrent", previous)


def call(api: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    """The results of a cuda.bindings function, without its status. Raises KernelUnavailableError if it failed."""
    status, *results = getattr(api, name)(*arguments)
    if int(status) != 0:
        raise KernelUnavailableError(f"{name} failed: {status.name}")
    return tuple(results)


def _text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
