"""NVRTC: compiles a program to a binary for one GPU architecture, in memory."""

import functools
from typing import Any

from ddp_compile.errors import KernelUnavailableError
from ddp_compile.kernels.cuda.driver import call
from ddp_compile.kernels.cuda.programs import Program, headers

OPTIONS = ("--std=c++17",)

# The first architecture with bfloat16 conversions and a minimum that keeps NaN.
OLDEST_CAPABILITY = (8, 0)


class Compiler:
    """NVRTC, as found by cuda.bindings; raises a KernelUnavailableError if either is missing, or cannot be loaded."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import nvrtc
        except ImportError as error:
            raise KernelUnavailableError(
                f"cuda.bindings cannot be imported ({error}); install the version of cuda-bindings for torch's CUDA"
            ) from error
        self._nvrtc: Any = nvrtc
        self._call = functools.partial(call, nvrtc)
        try:
            self.version = "{}.{}".format(*self._call("nvrtcVersion"))
            self.architectures: list[int] = list(self._call("nvrtcGetSupportedArchs")[0])
        except KernelUnavailableError:
            raise
        except Exception as error:  # versions of cuda.bindings raise different classes for a missing library
            raise KernelUnavailableError(
                f"NVRTC cannot be loaded ({error}); install the version of nvidia-cuda-nvrtc for torch's CUDA"
            ) from error

    def target(self, capability: tuple[int, int]) -> str:
        """The newest architecture that NVRTC and the device know; raises KernelUnavailableError if there is none."""
        major, minor = capability
        if capability < OLDEST_CAPABILITY:
            raise KernelUnavailableError(
                f"the kernels need compute capability 8.0 or newer, but the device has {major}.{minor}"
            )
        known = [arch for arch in self.architectures if 10 * major <= arch <= 10 * major + minor]
        if not known:
            raise KernelUnavailableError(
                f"NVRTC {self.version} cannot compile for compute capability {major}.{minor}; install a newer one"
            )
        return f"sm_{max(known)}"

    def compile(self, program: Program, target: str) -> bytes:
        """The binary (cubin) of a program; raises a KernelUnavailableError with the log if NVRTC refuses the source."""
        files = headers()
        (handle,) = self._call(
            "nvrtcCreateProgram",
            program.text().encode(),
            f"{program.name}.cu".encode(),
            len(files),
            [text.encode() for text in files.values()],
            [name.encode() for name in files],
        )
        try:
            options = [option.encode() for option in (f"--gpu-architecture={target}", *OPTIONS)]
            (status,) = self._nvrtc.nvrtcCompileProgram(handle, len(options), options)
            if int(status) != 0:
                raise KernelUnavailableError(f"NVRTC {self.version} cannot compile {program.name}: {self._log(handle)}")
            (size,) = self._call("nvrtcGetCUBINSize", handle)
            binary = bytearray(size)
            self._call("nvrtcGetCUBIN", handle, binary)
            return bytes(binary)
        finally:
            self._nvrtc.nvrtcDestroyProgram(handle)

    def _log(self, handle: Any) -> str:
        (size,) = self._call("nvrtcGetProgramLogSize", handle)
        log = bytearray(size)
        self._call("nvrtcGetProgramLog", handle, log)
        return log.decode(errors="replace").rstrip("\0\n")
