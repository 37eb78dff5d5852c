"""Builds the C++ library of the CPU kernels; everything else about the package is in pyproject.toml.

The library is optional: without a compiler the package installs, and its kernels run in torch's own operations.
DDP_COMPILE_NATIVE=1 makes a failed build an error, DDP_COMPILE_NATIVE=0 leaves the library out.
"""

import os
import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

runpy.run_path("ddp_compile/checkout.py")  # refuses files in the place of the links to kernels/ and others

NATIVE = "ddp_compile/kernels/native"
SOURCES = f"{NATIVE}/csrc"
SOURCE_HASH = runpy.run_path(f"{NATIVE}/source_hash.py")["source_hash"](Path(SOURCES))


def remove_library() -> None:
    """What an earlier build left in place."""
    for left_over in Path(NATIVE).glob("_core*"):
        left_over.unlink()


class BuildCore(build_ext):
    """Gives each compiler the flags it knows; what an earlier build left never takes the place of one that fails."""

    def run(self) -> None:
        if self.inplace:
            remove_library()
        super().run()

    def build_extensions(self) -> None:
        is_msvc = self.compiler.compiler_type == "msvc"
        for extension in self.extensions:
            # No contraction: fused multiply-adds would make processors disagree in the last bit of compressed values.
            extension.extra_compile_args = (
                ["/std:c++17", "/O2", "/fp:precise", "/EHsc"]
                if is_msvc
                else ["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi", "-g0"]
            )
            extension.extra_link_args = [] if is_msvc else ["-pthread"]
            Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
        super().build_extensions()


class PlatformWheel(bdist_wheel):
    """One wheel for every version of Python: the library is called through ctypes and uses the stable ABI alone."""

    def get_tag(self) -> tuple[str, str, str]:
        _python, _abi, platform = super().get_tag()
        return "py3", "none", platform


wanted = os.environ.get("DDP_COMPILE_NATIVE", "")
if wanted not in ("", "0", "1"):
    sys.exit(f"DDP_COMPILE_NATIVE={wanted!r} must be 1 (fail without the C++ library), 0 (leave it out) or unset")

core = Extension(
    "ddp_compile.kernels.native._core",
    sources=[f"{SOURCES}/{name}.cpp" for name in ("library", "simd", "tensor_table")],
    depends=[f"{SOURCES}/{name}.h" for name in ("dlpack_abi", "formats", "lanes", "loops", "simd", "tensor_table")],
    define_macros=[("DDP_COMPILE_SOURCE_HASH", f'"{SOURCE_HASH}"')],
    language="c++",
    py_limited_api=True,
    optional=wanted != "1",
)

if wanted == "0":
    remove_library()

setup(
    ext_modules=[] if wanted == "0" else [core],
    cmdclass={"build_ext": BuildCore, "bdist_wheel": PlatformWheel},
)
