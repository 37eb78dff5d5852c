"""A device that runs the CUDA kernels on the CPU: the sources of the package, compiled with emulated_device.cuh.

Only what a driver does is replaced. Arguments arrive as the bytes that a launch would copy, and CPU tensors stand in
for CUDA tensors.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ddp_compile.kernels.cuda.module import KernelDevice
from ddp_compile.kernels.cuda.programs import PROGRAM_OF, Program, headers

DEVICE_HEADER = Path(__file__).with_name("emulated_device.cuh")

# As many blocks as three multiprocessors take: fewer than most launches here have chunks, so that blocks take several.
NUM_MULTIPROCESSORS = 3

STREAM = 0xABCD


class Launch(NamedTuple):
    kernel: str
    num_blocks: int
    num_threads: int
    stream: int


class EmulatedDriver:
    """Loads shared libraries instead of cubins and runs their functions at once; keeps a list of the launches."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def load(self, binary: bytes) -> ctypes.CDLL:
        return ctypes.CDLL(binary.decode())

    def function(self, module: ctypes.CDLL, name: str) -> tuple[str, Callable[..., bytes | None]]:
        function = module[name]
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_uint]
        return name, function

    def launch(
        self,
        function: tuple[str, Callable[..., bytes | None]],
        num_blocks: int,
        num_threads: int,
        parameters: int,
        stream: int,
    ) -> None:
        name, run = function
        self.launches.append(Launch(name, num_blocks, num_threads, stream))
        assert num_blocks > 0, "the driver refuses an empty grid"
        failure = run(parameters, num_blocks)
        assert failure is None, f"{name}: {(failure or b'').decode()}"


class EmulatedDevice(KernelDevice):
    """`KernelDevice` with the emulated driver; programs are compiled into ``folder`` unless they are there."""

    def __init__(self, folder: Path) -> None:
        self.driver = EmulatedDriver()
        self.compiler = Compiler(folder)
        super().__init__(self.driver, self.compiler, lambda: STREAM, NUM_MULTIPROCESSORS, "emulated")

    def argument_bytes(self, kernel: str) -> int:
        """The size that the sources give to the arguments of a kernel."""
        return int(self.driver.load(self.compiler(PROGRAM_OF[kernel]))[f"{kernel}_bytes"]())


class Compiler:
    """Compiles programs to shared libraries, whose paths are the binaries."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name, text in headers().items():
            if name != "device.cuh":
                (folder / name).write_text(text)
        (folder / "device.cuh").write_text(DEVICE_HEADER.read_text())

    def __call__(self, program: Program) -> bytes:
        source = self._folder / f"{program.name.replace(' ', '_')}.cpp"
        library = source.with_suffix(".so")
        if not library.exists():
            source.write_text(program.text())
            compiler = shutil.which("c++") or shutil.which("g++")
            assert compiler is not None, "the tests need a C++ compiler"
            flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
            unfinished = source.with_suffix(f".{os.getpid()}")  # other processes may compile the same
            subprocess.run([compiler, *flags, "-Wno-unknown-pragmas", source, "-o", unfinished], check=True)
            unfinished.rename(library)
        return str(library).encode()
