"""The checks that test_cuda_driver.py runs on fake_cuda_driver.c: ``python cuda_driver_checks.py LIBCUDA FOLDER``."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path

import pytest
import torch
from cuda_emulation import NUM_MULTIPROCESSORS, STREAM, Compiler
from kernel_values import using

from ddp_compile.errors import KernelUnavailableError
from ddp_compile.kernels.cuda.driver import CudaDriver
from ddp_compile.kernels.cuda.executor import CudaExecutor
from ddp_compile.kernels.cuda.module import KernelDevice
from ddp_compile.kernels.cuda.programs import PROGRAM_OF, STATS_KERNEL


class FakeDriver:
    """The state of the stand-in driver in this thread."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.fake_current_context.restype = ctypes.c_void_p
        self._library.fake_last_stream.restype = ctypes.c_uint64
        self._library.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]

    def context(self) -> int | None:
        return self._library.fake_current_context()

    def enter(self, context: int | None) -> None:
        self._library.cuCtxSetCurrent(context)

    def set_version(self, version: int) -> None:
        self._library.fake_set_version(version)

    def last_stream(self) -> int:
        return int(self._library.fake_last_stream())

    def capture_mode(self) -> int:
        return int(self._library.fake_capture_mode())

    def last_num_threads(self) -> int:
        return int(self._library.fake_last_num_threads())


def device_of(ordinal: int, folder: Path) -> KernelDevice:
    return KernelDevice(CudaDriver(ordinal), Compiler(folder), lambda: STREAM, NUM_MULTIPROCESSORS, "fake")


def check_move(device: KernelDevice) -> None:
    tensors = [torch.randn(100 + i) for i in range(40)]
    flat = torch.zeros(sum(tensor.numel() for tensor in tensors))
    with using("cuda", device):
        executor = CudaExecutor(tensors, flat, None)
    executor.read(tensors, flat, written=False)
    stats = torch.empty(16, dtype=torch.uint8)
    executor.move(flat, True, 0.5, stats)
    assert torch.equal(flat, torch.cat(tensors) * 0.5)
    torch.testing.assert_close(stats[:8].view(torch.float64)[0], flat.double().square().sum())


def main(libcuda: str, folder: Path) -> None:
    fake = FakeDriver(libcuda)
    device = device_of(0, folder)
    assert fake.context() is None
    check_move(device)
    assert fake.last_stream() == STREAM and fake.last_num_threads() == 256
    assert fake.capture_mode() == 0, "loading goes back to the mode that there was"
    mine = fake.context()
    assert mine is not None, "a thread without a context is left with one"

    # Another device's context is there again after each launch.
    check_move(device_of(1, folder))
    assert fake.context() == mine
    fake.enter(mine + 1)
    check_move(device)
    assert fake.context() == mine + 1

    failures: list[BaseException] = []

    def in_thread() -> None:
        try:
            assert fake.context() is None
            check_move(device)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert failures == []

    driver = CudaDriver(0)
    with pytest.raises(KernelUnavailableError, match="cuModuleLoadData failed: CUDA_ERROR_INVALID_VALUE"):
        driver.load(b"no such library")
    module = driver.load(Compiler(folder)(PROGRAM_OF[STATS_KERNEL]))
    with pytest.raises(KernelUnavailableError, match="cuModuleGetFunction failed: CUDA_ERROR_NOT_FOUND"):
        driver.function(module, "no_such_kernel")
    assert fake.capture_mode() == 0 and fake.context() == mine + 1
    function = device.prepare(STATS_KERNEL)
    with pytest.raises(RuntimeError, match="a CUDA kernel could not be launched: CUDA_ERROR_INVALID_VALUE"):
        driver.launch(function, 0, 256, 0, 0)
    fake.set_version(12000)
    with pytest.raises(KernelUnavailableError, match=r"driver for CUDA 12\.1 or newer, but this one is for 12\.0"):
        CudaDriver(0)
    print("all checks passed")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
