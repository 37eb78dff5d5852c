"""The CUDA kernels if something that they need is missing, and how they are compiled and loaded."""

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from process_copies import run_in_copy

from ddp_compile import kernels
from ddp_compile.errors import KernelUnavailableError
from ddp_compile.kernels import executors
from ddp_compile.kernels.cuda import module
from ddp_compile.kernels.cuda.compiler import Compiler
from ddp_compile.kernels.cuda.driver import CudaDriver
from ddp_compile.kernels.cuda.module import KernelDevice
from ddp_compile.kernels.cuda.programs import LARGEST_KERNEL, PROGRAM_OF, PROGRAMS, Program
from ddp_compile.kernels.native import library

LARGEST = PROGRAM_OF[LARGEST_KERNEL].name


class CountingDriver:
    """Loads and launches nothing, and records the requests."""

    def __init__(self, *_: Any) -> None:
        self.loaded: list[bytes] = []

    def load(self, binary: bytes) -> bytes:
        self.loaded.append(binary)
        return binary

    def function(self, module: bytes, name: str) -> tuple[bytes, str]:
        return module, name

    def launch(self, *_: Any) -> None:
        raise AssertionError("nothing is launched here")


class CountingApi:
    """The part of ``cuda.bindings.driver`` that finds a device and loads a module."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self, version: int) -> None:
        self.version = version
        self.loaded: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: (0, 1)

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, self.version

    def cuModuleLoadData(self, binary: bytes) -> tuple[int, int]:
        self.loaded.append(binary)
        return 0, 1


class FakeCompiler:
    """Stands in for NVRTC; a binary is the name of its program and target."""

    version = "13.0"
    architectures = (80, 90, 100)

    def target(self, capability: tuple[int, int]) -> str:
        return "sm_{}{}".format(*capability)

    def compile(self, program: Program, target: str) -> bytes:
        return f"{program.name} for {target}".encode()


@pytest.fixture
def cuda_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which torch sees a device; with a compiler and a driver that only pretend."""
    properties = SimpleNamespace(name="Device X", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda ordinal: properties)
    monkeypatch.setattr(module, "Compiler", FakeCompiler)
    monkeypatch.setattr(module, "CudaDriver", CountingDriver)
    monkeypatch.setattr(module, "_devices", {})
    executors.available.cache_clear()
    yield
    executors.available.cache_clear()


def test_status_imports_no_bindings_without_device() -> None:
    program = (
        "import sys, torch\n"
        "assert 'ddp_compile' not in sys.modules\n"
        "torch.cuda.is_available = lambda: False\n"
        "bindings = lambda: {name for name in sys.modules if name.split('.')[0] == 'cuda'}\n"
        "before = bindings()\n"  # torch may have imported some itself
        "from ddp_compile import kernels\n"
        "kernels.status()\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert bindings() == before\n"
    )
    ended = run_in_copy(exec, program, {})
    assert ended.exit_code == 0, ended.stderr


def reason_of_the_reference(caplog: pytest.LogCaptureFixture) -> str:
    """Why torch's own operations move CUDA tensors, as `status` and one warning say."""
    for _ in range(2):
        _, of_cuda = kernels.status()
        assert of_cuda.implementation == "reference"
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert warning == f"gradients on cuda:0 are moved by torch's own operations: {of_cuda.reason}"
    return of_cuda.reason


@pytest.mark.parametrize(("version", "is_too_old"), [(12000, True), (12010, False), (13000, False)])
def test_old_driver_is_not_used(
    cuda_machine: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: int,
    is_too_old: bool,
) -> None:
    api = CountingApi(version)
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=api))
    monkeypatch.setattr(module, "CudaDriver", CudaDriver)
    if is_too_old:
        reason = reason_of_the_reference(caplog)
        assert (
            reason == "the kernels need a driver for CUDA 12.1 or newer, but this one is for 12.0; install a newer one"
        )
    else:
        assert kernels.status()[1].implementation == "cuda"
        assert api.loaded == [f"{LARGEST} for sm_90".encode()]


def test_old_compiler_is_not_used(
    cuda_machine: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_small(self: FakeCompiler, program: Program, target: str) -> bytes:
        if program.header == "move.cuh":
            raise KernelUnavailableError(f"cannot compile {program.name}: Formal parameter space overflowed")
        return b""

    monkeypatch.setattr(FakeCompiler, "compile", compile_small)
    assert reason_of_the_reference(caplog) == f"cannot compile {LARGEST}: Formal parameter space overflowed"


def test_cuda_needs_the_library(
    cuda_machine: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise KernelUnavailableError("the C++ library was not built")

    monkeypatch.setattr(library, "load", refuse)
    assert executors.choose(torch.device("cuda", 0), torch.float32) == "reference"
    assert caplog.messages == ["gradients on cuda:0 are moved by torch's own operations: the C++ library was not built"]


@pytest.mark.parametrize("unsupported", [0, 1])
def test_each_device_for_itself(
    cuda_machine: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, unsupported: int
) -> None:
    """Whichever of two devices is the current one, and whichever was asked for first."""

    def properties_of(ordinal: int) -> SimpleNamespace:
        major = 7 if ordinal == unsupported else 9
        return SimpleNamespace(name=f"Device {ordinal}", major=major, minor=0, multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of)
    monkeypatch.setattr(FakeCompiler, "target", Compiler.target)
    for ordinal in (0, 1, 0, 1):
        expected = "reference" if ordinal == unsupported else "cuda"
        assert executors.choose(torch.device("cuda", ordinal), torch.float32) == expected
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"gradients on cuda:{unsupported} are moved by torch's own operations:"
        " the kernels need compute capability 8.0 or newer, but the device has 7.0"
    ]
    for current in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        _, of_cuda = kernels.status()
        assert of_cuda.implementation == ("reference" if current == unsupported else "cuda")
        assert (f"Device {current}" in of_cuda.reason) == (current != unsupported)


def test_threads_load_a_program_once() -> None:
    compiled: list[str] = []
    driver = CountingDriver()
    device = KernelDevice(driver, lambda program: compiled.append(program.name) or b"", lambda: 0, 1, "x")  # type: ignore[func-returns-value]
    kernel = PROGRAMS[1].kernels[0]
    threads = [threading.Thread(target=device.prepare, args=(kernel,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.prepare(PROGRAMS[1].kernels[1])
    assert compiled == [PROGRAMS[1].name] and len(driver.loaded) == 1
    device.prepare(PROGRAMS[0].kernels[0])
    assert len(driver.loaded) == 2
